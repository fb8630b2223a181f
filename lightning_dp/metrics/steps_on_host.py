"""Forward mode in several processes: what each of them says in a step that it runs once.

A step writes down its calls of `self.log` and of metrics. What the replicas say inside of a spread
call is joined in their process, and becomes a part of what its step says: processes may spread
different numbers of calls. At the end of the step the processes tell each other, once, and make the
calls of all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule

from lightning_dp.metrics.arguments import MetricCall, join_arguments
from lightning_dp.metrics.journal import Journal, Journals
from lightning_dp.metrics.logs import (
    Call,
    LateLog,
    aligned,
    brought_to,
    check_keys,
    merged_log,
    names_of,
)
from lightning_dp.metrics.one_call import CalledModule, StepAttributes
from lightning_dp.metrics.torchmetrics_on_replicas import device_of
from lightning_dp.parallel.contexts import Contexts, Lasting, Paired, StandIn, replaced
from lightning_dp.parallel.gather import RowRules
from lightning_dp.parallel.replicate import ModuleStructure, Replicas
from lightning_dp.parallel.scatter import Shards
from lightning_dp.parallel.split import Order

if TYPE_CHECKING:
    from lightning_dp.metrics.exchange import Exchange
    from lightning_dp.parallel.processes import World


class HostJournals(Journals):
    """The journal of a step that every process runs once, with its part of the batch.

    A process without samples of the batch replays what the others say.
    """

    exchange: Exchange

    def __init__(self, module: LightningModule, device: torch.device, world: World) -> None:
        super().__init__(module, [device], device, world)
        self._structure: ModuleStructure | None = None
        self._called: dict[int, CalledModule] = {}
        self._hearing: _Hearing | None = None

    @property
    def calls(self) -> list[Call]:
        """What the step has said so far."""
        return self._journals[0].calls

    @contextmanager
    def around_step(self, samples: int, dim: int) -> Iterator[None]:
        """Records a step with so many samples; at its end the processes exchange the records."""
        shards = Shards((samples,), [None], row_rules=RowRules(dim))
        try:
            with self._recording():
                yield
            logs = self._replay(shards)
        finally:
            self.exchange.syncs.in_step = False
        self.log(logs)

    @contextmanager
    def around_backward(self) -> Iterator[None]:
        """A backward after the step, whose checkpoints call the module again: it says nothing."""
        if self._hearing is not None:  # the step makes it
            yield
            return
        try:
            with self._recording():
                yield
        finally:
            self.exchange.syncs.in_step = False
        if self.calls:
            raise RuntimeError(_said_in_backward(self.calls[0]))

    def paused(self) -> AbstractContextManager[None]:
        """While it lasts, nothing stands on the module: replicas follow its attributes."""
        hearing = self._hearing
        return Contexts([] if hearing is None else [Paired(hearing.end, hearing.begin)])

    def bound(self, call: MetricCall) -> list[tuple[StepAttributes, dict[str, Any]]]:
        """What the step has bound on a metric by now, and on top of it what a spread call has."""
        return [
            (
                self._attributes[id(there.root)],
                {**self._called[id(there.root)].bound(weights=False), **values},
            )
            for there, values in call.bound
        ]

    @contextmanager
    def _recording(self) -> Iterator[None]:
        self.calls.clear()
        self.exchange.syncs.in_step = True
        if self._structure is None or self._structure.has_changed():
            self._structure = ModuleStructure(self._module, self)
            self._follow([self._structure.modules])
        metrics = self._journals[0].metrics
        self._called = {} if metrics is None else metrics.modules
        if metrics is not None:  # replayed at the end of the step, whose optimizers have stepped
            metrics.weights_move = not self._module.automatic_optimization
        hearing = _Hearing(self._module, self._journals[0])
        with Contexts(chain(self._measuring([0]), [hearing])), replaced(self, _hearing=hearing):
            yield
        hearing.retire()


class SpreadJournals(Journals):
    """The journals of replicas in spread calls: what they say becomes a part of what a step says.

    They exchange nothing. What they say is joined in their process, and not replayed.
    """

    def __init__(
        self,
        module: LightningModule,
        devices: Sequence[torch.device],
        output_device: torch.device,
        host: HostJournals,
    ) -> None:
        super().__init__(module, devices, output_device)
        self._host = host
        self._said_before = 0

    def begin(self, replicas: Replicas, active: Sequence[int]) -> AbstractContextManager[None]:
        """A spread call begins."""
        self._said_before = len(self._host.calls)
        return super().begin(replicas, active)

    def settle(self, replicas: Replicas, shards: Shards) -> list[LateLog]:
        """Gives the module what the replicas have left, and the step what they have said."""
        changes = self._state.changes(shards.active)
        self._hand_over(shards)
        is_idle = self._host.exchange.is_idle
        self._state.settle(changes, replicas, shards, keeps_items=not is_idle)
        return []

    def undo(self) -> None:
        """Takes back what the call has left on the module, and what it has said."""
        del self._host.calls[self._said_before :]
        super().undo()

    def _hand_over(self, shards: Shards) -> None:
        journals: Sequence[list[Call]] = [self._journals[k].calls for k in shards.active]
        if self._crosses:
            journals = brought_to(self._output_device, journals)
        sizes, order = shards.active_sizes, shards.active_order
        for row in aligned(journals, sizes, order, shards.row_rules.dim):
            present = [sizes[i] for i in row]
            calls: list[Any] = list(row.values())
            if isinstance(calls[0], MetricCall):
                positions = None if order is None else [order[i] for i in row]
                joined = self._joined(calls, present, positions, shards.row_rules.dim)
                self._host.calls.extend(joined)
                continue
            if len(row) < len(journals):
                check_keys(calls[0].name, row, names_of(shards, self._devices))
            merged = merged_log(calls, present, self._output_device, self._varying)
            self._host.calls.append(merged)

    def _joined(
        self,
        calls: Sequence[MetricCall],
        sizes: Sequence[int],
        order: Order | None,
        dim: int,
    ) -> list[MetricCall]:
        """One call of a metric, as the step itself would make it; or several, of `update`."""
        first = calls[0]
        if first.method == "reset":
            return [first._replace(bound=self._host.bound(first))]
        joined = join_arguments(calls, sizes, device_of(first.metric), dim, order)
        if joined is not None:
            args, kwargs = joined
            return [first._replace(args=args, kwargs=kwargs, bound=self._host.bound(first))]
        if first.method == "forward":
            raise TypeError(
                f"Expected arguments of {type(first.metric).__qualname__} that can be joined over "
                "the replicas, as several processes need them for one call of its forward, got "
                "others. Call it by update in the module's forward, or by forward in the step."
            )
        return [call._replace(bound=self._host.bound(call)) for call in calls]


class _Hearing(Lasting):
    """`self.log` and the metrics of the module write to the step's journal; it may begin again."""

    def __init__(self, module: LightningModule, journal: Journal) -> None:
        self._module, self._journal = module, journal
        # One for all times: `self.log(name, self(x))` asks for it, spreads a call, and calls it.
        self._log = StandIn(module, "log", journal.log)
        self._standing: replaced | None = None

    def begin(self) -> None:
        """It records from here on."""
        if self._standing is None:
            self._standing = replaced(self._module, log=self._log)
            self._standing.__enter__()
        if self._journal.metrics is not None:
            self._journal.metrics.go_on()

    def end(self) -> None:
        """It does not. What the step has bound in the place of `self.log` stays."""
        if self._journal.metrics is not None:
            self._journal.metrics.pause()
        if self._standing is not None and vars(self._module).get("log") is self._log:
            self._standing.end()
            self._standing = None

    def retire(self) -> None:
        """It never records again, whoever still calls it."""
        self._log.retire()


def _said_in_backward(call: Call) -> str:
    what = (
        f"{call.method} of a metric ({type(call.metric).__qualname__})"
        if isinstance(call, MetricCall)
        else f"self.log({call.name!r})"
    )
    return (
        f"Expected a backward that logs and measures nothing, as it is not exchanged between "
        f"processes, got {what}: a checkpoint calls the module again. Log and measure in the step, "
        "outside of what is checkpointed."
    )
