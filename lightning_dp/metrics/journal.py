"""The journal: what replicas say to the outside during a step, and its replay after the step.

Replicas write down their calls of `self.log` and of metrics, in the order in which they make them.
After the step the same calls of all replicas are joined and made once, on the main thread, on the
user's module.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_dp.lightning_private import own_device
from lightning_dp.metrics.arguments import MetricCall
from lightning_dp.metrics.logs import (
    Call,
    LateLog,
    aligned,
    brought_to,
    check_keys,
    late_log,
    log_call,
    log_late,
    merged_log,
    names_of,
    option_names,
)
from lightning_dp.metrics.no_value import NoValue
from lightning_dp.metrics.one_call import StepAttributes, names_of_metric, state_of_metric
from lightning_dp.metrics.recorders import ReplicaMetrics, all_in
from lightning_dp.metrics.torchmetrics_on_replicas import Returned, is_metric, replay
from lightning_dp.metrics.undo import MetricStates
from lightning_dp.parallel.contexts import Contexts, StandIn, standing_in
from lightning_dp.parallel.replicate import ReplicaRules, Replicas
from lightning_dp.parallel.scatter import Shards
from lightning_dp.parallel.torch_private import backward_id
from lightning_dp.state import ModuleState, own_optimizers

if TYPE_CHECKING:
    from lightning_dp.metrics.exchange import Exchange
    from lightning_dp.parallel.processes import World


class Journal:
    """The calls of one replica during one step.

    What is logged leaves some devices at once, for which the host waits before it is read.
    """

    def __init__(self, names: Sequence[str], leaving: Collection[torch.device] = ()) -> None:
        self._names, self._leaving = names, leaving
        self.calls: list[Call] = []
        self.metrics: ReplicaMetrics | None = None

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Stands for `self.log` on a replica."""
        source = None
        if self.metrics is not None:
            source, value = self.metrics.source(value), self.metrics.original(value)
        if isinstance(value, NoValue):
            value = value.error if source else value.fail()
        leaving = self._leaving if backward_id() == -1 else ()  # after a backward nobody waits
        call = log_call(name, value, args, kwargs, leaving, self._names, source)
        self.calls.append(call)


class Journals(ReplicaRules):
    """The journals of all replicas of a LightningModule.

    With a `world` of several processes, what the replicas of all of them say is joined and replayed
    in each, as if they were of one. A process without samples replays what the others say.

    Attributes:
        exchange: what tells the processes of each other, if there are several.
    """

    def __init__(
        self,
        module: LightningModule,
        devices: Sequence[torch.device],
        output_device: torch.device,
        world: World | None = None,
    ) -> None:
        self._module = module
        self._output_device = output_device
        self._varying: set[str] = set()  # logged names whose batch_size differs between shards
        self.exchange: Exchange | None = None
        if world is not None:
            from lightning_dp.metrics.exchange import Exchange

            self.exchange = Exchange(world, output_device)
        self._crosses = any(device != output_device for device in devices)
        leaving = devices if output_device.type == "cpu" else ()
        names = option_names(type(module).log)
        self._journals = [Journal(names, leaving) for _ in devices]
        self._devices = list(devices)
        self._submodules: list[list[nn.Module]] = []
        self._attributes: dict[int, StepAttributes] = {}
        self._metric_states = MetricStates()
        self._state = ModuleState(output_device, names_of_metric)

    def is_apart(self, module: nn.Module) -> bool:
        """Metrics are replicated wherever they are kept."""
        return is_metric(module)

    def stays(self, module: nn.Module) -> bool:
        """In forward mode, metrics are on the output device."""
        tensors = chain(module.parameters(), module.buffers())
        return any(tensor.device != self._devices[0] for tensor in tensors)

    def own_attributes(
        self, module: nn.Module, twin: nn.Module, k: int, device: torch.device
    ) -> dict[str, Any]:
        """`self.device`, `log` and `optimizers` of a replica, and the state of a metric."""
        own: dict[str, Any] = {**own_device(module, device), **state_of_metric(module, device)}
        if module is self._module:
            own["log"] = StandIn(twin, "log", self._journals[k].log)
            optimizers = partial(own_optimizers, module, weakref.ref(twin))
            own["optimizers"] = StandIn(twin, "optimizers", optimizers)
        return own

    def around(
        self,
        replicas: Replicas,
        shards: Shards,
        is_rerun: bool = False,
    ) -> AbstractContextManager[None]:
        """Records while the replicas run; if all went well, replays.

        A rerun has done so before. It, and a step that did not fit and will run again, leave the
        module and its metrics as they were.
        """
        return Recording(self, replicas, shards, is_rerun)

    def begin(self, replicas: Replicas, active: Sequence[int]) -> AbstractContextManager[None]:
        """A step begins; what lasts while its replicas run, and the journals record."""
        for journal in self._journals:
            journal.calls.clear()
        if self.exchange is not None:
            self.exchange.syncs.in_step = True
        self._follow(replicas.submodules)
        self._state.begin(replicas, active)
        # Replica 0 is the user's module: it records only while the step lasts.
        own = standing_in(self._module, "log", self._journals[0].log)
        return Contexts(chain([own], self._measuring(active))) if self._attributes else own

    def settle(self, replicas: Replicas, shards: Shards) -> list[LateLog]:
        """Gives the module what the replicas have left; what is to be logged."""
        changes = self._state.changes(shards.active)  # not those of the calls that follow
        logs = self._replay(shards)
        counts = self.exchange is None or not self.exchange.is_idle
        self._state.settle(changes, replicas, shards, keeps_items=counts)
        return logs

    def undo(self) -> None:
        """Takes back what the step has left on the module and its metrics."""
        self._state.undo()
        self._metric_states.give_back()

    def _follow(self, submodules: list[list[nn.Module]]) -> None:
        """Finds the metrics of all replicas, if these are others than before."""
        if submodules is self._submodules:
            return
        self._submodules, roots = submodules, submodules[0]
        inner = set(map(id, chain.from_iterable(map(all_in, filter(is_metric, roots)))))
        self._attributes = {id(m): StepAttributes(m) for m in roots if id(m) in inner}
        for journal, own, device in zip(self._journals, submodules, self._devices, strict=True):
            if self._attributes:
                pair, record = (roots, own), journal.calls.append
                journal.metrics = ReplicaMetrics(pair, record, device, self._attributes)
            else:
                journal.metrics = None
        if self.exchange is not None:
            self.exchange.follow(submodules, self._attributes)

    def _measuring(self, active: Sequence[int]) -> Iterator[AbstractContextManager[None]]:
        """Contexts in which metrics record what the replicas that work do with them."""
        for attributes in self._attributes.values():
            attributes.begin_step()
        for k in active:
            metrics = self._journals[k].metrics
            if metrics is not None:
                yield metrics.recording()

    def _replay(self, shards: Shards) -> list[LateLog]:
        """Makes the calls of metrics; what is to be logged."""
        names: list[str] = []
        sizes, order = shards.active_sizes, shards.active_order
        journals: Sequence[list[Call]] = [self._journals[k].calls for k in shards.active]
        if self._crosses:
            journals = brought_to(self._output_device, journals)
        if self.exchange is not None:
            journals, sizes, order, names = self.exchange.of_all(journals, shards, self._devices)
        called = {c.metric: None for calls in journals for c in calls if isinstance(c, MetricCall)}
        if called:
            self._metric_states.keep(list(called))
        logs: list[LateLog] = []
        returned: Returned = {}
        for row in aligned(journals, sizes, order, shards.row_rules.dim):
            present = [sizes[i] for i in row]
            calls: list[Any] = list(row.values())
            if isinstance(calls[0], MetricCall):
                positions = None if order is None else [order[i] for i in row]
                value = replay(calls, present, positions, shards.row_rules.dim, self._module)
                if calls[0].method == "forward" and len(row) == len(journals):
                    returned.setdefault(id(calls[0].metric), []).append(value)
                if self.exchange is not None:
                    self.exchange.syncs.count_as_of_all(calls)
                continue
            if len(row) < len(journals):
                check_keys(calls[0].name, row, names or names_of(shards, self._devices))
            merged = merged_log(calls, present, self._output_device, self._varying)
            logs.append(late_log(merged, calls, returned, self._output_device))
        return logs

    def log(self, logs: Sequence[LateLog]) -> None:
        """Logs them, last of all: that cannot be undone."""
        if self._metric_states.kept:
            self._metric_states.drop()
        samples = None if self.exchange is None else self.exchange.end()
        if logs:
            log_late(self._module, logs, samples)


class Recording:
    """One step, see `Journals.around`. What has to be put back it has entered itself."""

    def __init__(
        self,
        journals: Journals,
        replicas: Replicas,
        shards: Shards,
        is_rerun: bool,
    ) -> None:
        self._journals, self._is_rerun = journals, is_rerun
        self._replicas, self._shards = replicas, shards

    def __enter__(self) -> None:
        """The step begins."""
        self._inside = self._journals.begin(self._replicas, self._shards.active)
        try:
            self._inside.__enter__()
        except torch.OutOfMemoryError:
            self._journals.undo()
            raise

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        """It ends."""
        logs: list[LateLog] = []
        try:
            self._inside.__exit__(kind, *error)
            if kind is None and not self._is_rerun:
                logs = self._journals.settle(self._replicas, self._shards)
        except torch.OutOfMemoryError:
            self._journals.undo()
            raise
        finally:
            if (exchange := self._journals.exchange) is not None:
                exchange.syncs.in_step = False
        if kind is None and not self._is_rerun:
            self._journals.log(logs)
        elif kind is None or issubclass(kind, torch.OutOfMemoryError):
            self._journals.undo()
