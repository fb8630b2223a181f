"""Records what replicas log and measure during a step, and replays it once after the step."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_dp.lightning_private import own_device
from lightning_dp.metrics.logged_values import (
    LogCall,
    MetricAt,
    Source,
    as_number,
    check_keys,
    logging_for_all,
    merged_log,
    option_names,
    without_sync,
)
from lightning_dp.metrics.replay import Batch, Row, aligned, joined_arguments, replay
from lightning_dp.metrics.replica_metrics import (
    Call,
    MetricCall,
    Recording,
    ReplicaRecord,
    all_in,
    is_metric,
    names_of_metric,
    never,
    state_of_metric,
)
from lightning_dp.parallel.comm import to_device_coalesced
from lightning_dp.parallel.contexts import StandIn, replaced
from lightning_dp.parallel.devices import replica_names, replica_text
from lightning_dp.parallel.errors import add_note
from lightning_dp.parallel.gather import RowRules
from lightning_dp.parallel.replicate import ModuleStructure, ReplicaRules, Replicas
from lightning_dp.parallel.scatter import Shards, tree
from lightning_dp.parallel.split import Order
from lightning_dp.state import ModuleState, OwnOptimizers

if TYPE_CHECKING:
    from lightning_dp.parallel.processes import Losses, World


class _Records(NamedTuple):
    """The calls of replicas, with the sizes, the places in the batch and the names of these."""

    calls: Sequence[Sequence[Call]]
    sizes: Sequence[int]
    order: Order | None
    replicas: list[str]


class StepRecorder(ReplicaRules):
    """What replicas leave during a step: calls of `self.log`, of metrics, and state on self.

    After the step the calls of all replicas are merged, and made once on the main thread, on the
    user's module. With several processes those of all ranks are, on every rank; a rank without
    samples replays what the others recorded.

    Args:
        module: the user's module.
        devices: the replicas', root first.
        output_device: where logged values, and items of lists, end up.
        world: the processes that train together; None if this is the only one.
        host: with several processes, what records a step that this process runs once: what the
            replicas of a spread call record becomes a part of that.
    """

    def __init__(
        self,
        module: LightningModule,
        devices: Sequence[torch.device],
        output_device: torch.device,
        world: World | None = None,
        host: HostRecorder | None = None,
    ) -> None:
        self._module, self._devices = module, list(devices)
        self._output_device = output_device
        self.world, self._host = (world if host is None else host.world), host
        names = replica_names(devices, None if self.world is None else self.world.rank)
        self._names = [replica_text(k, names) for k in range(len(names))]
        self._call: Call | None = None  # that is being replayed
        self._varying: set[str] = set()  # logged names whose batch_size differs between shards
        self._warned: set[int] = set()  # metrics that only some replicas have updated
        self._crosses = any(device != output_device for device in devices)
        leaving = self._devices if output_device.type == "cpu" else []
        options = option_names(type(module).log)
        self._records = [ReplicaRecord(options, device, leaving) for device in devices]
        self._submodules: list[list[nn.Module]] = []
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
            own["log"] = StandIn(twin, "log", self._records[k].log)
            own["optimizers"] = StandIn(twin, "optimizers", OwnOptimizers(module, twin))
        return own

    @contextmanager
    def around(self, replicas: Replicas, shards: Shards, is_rerun: bool = False) -> Iterator[None]:
        """Records while the replicas run; if all went well, replays.

        A rerun has replayed before. It, and a step that ran out of memory and will run again, leave
        the module as it was.
        """
        self._follow(replicas.submodules)
        self._clear()
        try:
            self._state.begin(replicas, shards.active)
            with self._recording(shards.active):
                yield
            if is_rerun:
                self._state.undo()
                return
            is_idle = self.world is not None and self.world.is_idle
            self._state.settle(replicas, shards, keeps_items=not is_idle)
        except torch.OutOfMemoryError:
            self._state.undo()
            raise
        try:
            self._replay(shards)
        except torch.OutOfMemoryError as error:  # what was logged cannot be taken back
            raise RuntimeError(
                f"{self._place()}: expected room for the values of the whole batch, got: {error} "
                "Make the batch smaller."
            ) from error
        self._clear()

    def _follow(self, submodules: list[list[nn.Module]]) -> None:
        """Finds the metrics of all replicas, if these are others than before."""
        if submodules is not self._submodules:
            self._submodules = submodules
            for record, own in zip(self._records, submodules, strict=True):
                record.follow(own)

    @contextmanager
    def _recording(self, active: Sequence[int]) -> Iterator[Recording]:
        """Replica 0 is the user's module: it records only while the step lasts."""
        recording = Recording(self._module, self._records[0], [self._records[k] for k in active])
        try:
            with recording:
                yield recording
        finally:
            recording.retire()

    def _clear(self) -> None:
        for record in self._records:
            record.clear()

    def _replay(self, shards: Shards) -> None:
        """Makes the merged calls, in the order of the first replica."""
        self._call = None
        records = self._brought([self._records[k].calls for k in shards.active])
        names = [f"{self._names[k]} ({shards.sizes[k]} samples)" for k in shards.active]
        found = _Records(records, shards.active_sizes, shards.active_order, names)
        logging: AbstractContextManager[None] = nullcontext()
        if self.world is not None and self._host is None:
            found = self._of_all_ranks(found, shards.losses, self.world)
            logging = logging_for_all(self._module, sum(found.sizes))
        batch = Batch(found.sizes, found.order, shards.row_rules.dim)
        modules: Sequence[Any] = self._submodules[0]
        returned: dict[int, list[Any]] = {}  # what `forward` has returned for the whole batch
        self._warn_of_missing(found)
        with logging:
            for row in aligned(found.calls, batch, modules):
                self._make(row, batch, found.replicas, returned)

    def _make(
        self, row: Row, batch: Batch, replicas: list[str], returned: dict[int, list[Any]]
    ) -> None:
        """Makes one call of several replicas."""
        calls: list[Any] = list(row.values())
        first, present = calls[0], batch.of(row)
        self._call = first
        if isinstance(first, LogCall):
            if len(row) < len(replicas):
                check_keys(first.name, row, replicas)
            merged = merged_log(calls, present.sizes, self._output_device, self._varying)
            self._log(_with_value_of_batch(merged, calls, returned, self._output_device))
            return
        metric: Any = self._submodules[0][first.metric]
        if self._host is not None:
            joined = joined_arguments(calls, present, metric)
            one = [] if joined is None else [first._replace(args=joined[0], kwargs=joined[1])]
            self._host.calls.extend([first] if first.method == "reset" else one or calls)
            return
        if self.world is not None and first.method != "reset":
            for member in all_in(metric):
                if isinstance(member, Metric):
                    member.distributed_available_fn = never
        try:
            value = replay(calls, present, metric)
        except Exception as error:
            add_note(error, f"[in {self._place()}, for the batch of all replicas]")
            raise
        if first.method == "forward" and len(row) == len(replicas):
            returned.setdefault(first.metric, []).append(value)

    def _place(self) -> str:
        """Names the call that is being made."""
        if isinstance(self._call, MetricCall):
            return f"{self._call.method} of {self._described(self._call.metric)}"
        return f"self.log({self._call.name!r})" if self._call else "After the step"

    def _described(self, number: int) -> str:
        metric = self._submodules[0][number]
        path = next((name for name, own in self._module.named_modules() if own is metric), "")
        return f"the metric {path} ({type(metric).__qualname__})"

    def _warn_of_missing(self, found: _Records) -> None:
        """Names a metric, once, that some replicas have updated and others have not."""
        called: list[set[int]] = [
            {c.metric for c in r if isinstance(c, MetricCall) and c.method != "reset"}
            for r in found.calls
        ]
        for number in set[int]().union(*called) - set[int].intersection(*called) - self._warned:
            self._warned.add(number)
            names = [
                name for name, own in zip(found.replicas, called, strict=True) if number in own
            ]
            others = [name for name in found.replicas if name not in names]
            warnings.warn(
                f"{self._described(number)}: a step has updated it on "
                f"{', '.join(names)}, but not on {', '.join(others)}, whose samples it does not "
                "see. If the step leaves it out for small batches (if len(x) > 1), have it updated "
                "always: it gets the whole batch.",
                stacklevel=2,
            )

    def _log(self, call: LogCall) -> None:
        if self._host is not None:
            self._host.calls.append(call._replace(source=None))
            return
        if isinstance(call.value, Exception):
            raise call.value
        value = call.value
        if isinstance(value, MetricAt):
            value = self._submodules[0][value.number]
        self._module.log(call.name, value, **call.options)

    def _brought(self, records: list[list[Call]]) -> list[list[Call]]:
        """Brings logged tensors to the output device; from each other one in one copy.

        Nothing waits for these copies that does not wait for the loss: all replicas' are summed,
        and every backward begins with a gradient from where the sum is.
        """
        device = self._output_device
        away: list[tuple[list[Call], int, LogCall]] = []
        if self._crosses:
            records = list(map(list, records))
            for own in records:
                for i, call in enumerate(own):
                    if isinstance(call, LogCall) and isinstance(call.value, Tensor):
                        away.extend([(own, i, call)] * (call.value.device != device))
        if away:
            values = to_device_coalesced([call.value for *_, call in away], device)
            for (own, i, call), value in zip(away, values, strict=True):
                own[i] = call._replace(value=value)
        return records

    def _of_all_ranks(self, own: _Records, losses: Sequence[Losses], world: World) -> _Records:
        """What the replicas of all ranks recorded, in the order of the batch.

        Every rank takes part in every step: no other rank knows whether it has recorded anything.
        The losses of the step travel with the records.
        """
        from lightning_dp.parallel.processes import check_together

        calls = [[without_sync(c) if isinstance(c, LogCall) else c for c in r] for r in own.calls]
        own = own._replace(calls=calls)
        sent = None if world.is_idle else own
        gathered = world.gather((sent, [loss.own for loss in losses]))
        check_together(gathered)
        for own_losses, *of_all in zip(losses, *[along for _, along in gathered], strict=True):
            own_losses.of_all = of_all
        parts = [part for part, _ in gathered]
        parts[world.rank] = sent  # values may have a graph
        return _concatenated([part for part in parts if part is not None])


def _with_value_of_batch(
    merged: LogCall,
    calls: Sequence[LogCall],
    returned: dict[int, list[Any]],
    device: torch.device,
) -> LogCall:
    """Where replicas log what a metric has returned: what it has returned for the whole batch.

    Not where they log values of other calls, or where it was called for a sample at a time.
    """
    source: Source | None = merged.source
    if source is None or any(call.source != source for call in calls):
        return merged
    values = returned.get(source.metric, [])[source.call : source.call + 1]
    leaves = [leaf for value in values for leaf in tree.leaves(value)][source.leaf :]
    if not leaves:
        return merged
    is_number = isinstance(leaves[0], Tensor)
    return merged._replace(value=as_number(leaves[0], device) if is_number else leaves[0])


def _concatenated(parts: Sequence[_Records]) -> _Records:
    order: list[Sequence[int]] = []
    begin = 0
    for part in parts:
        starts = list(accumulate(part.sizes, initial=0))
        in_turn = [range(a, b) for a, b in pairwise(starts)]
        order += [[begin + i for i in places] for places in part.order or in_turn]
        begin += starts[-1]
    return _Records(
        [calls for part in parts for calls in part.calls],
        [size for part in parts for size in part.sizes],
        order if any(part.order is not None for part in parts) else None,
        [name for part in parts for name in part.replicas],
    )


class HostRecorder(StepRecorder):
    """Forward mode in several processes: records a step that every process runs once.

    At the end of the step the ranks exchange their records, once: they may spread different numbers
    of calls.
    """

    def __init__(self, module: LightningModule, device: torch.device, world: World) -> None:
        super().__init__(module, [device], device, world)
        self.world: World = world
        self._structure: ModuleStructure | None = None
        self._active: Recording | None = None

    @property
    def calls(self) -> list[Call]:
        """What the step has recorded so far."""
        return self._records[0].calls

    @contextmanager
    def around_step(self, samples: int, dim: int) -> Iterator[None]:
        """Records a step with so many samples, and replays what all ranks have recorded."""
        with self._whole_step():
            yield
        self._replay(Shards((samples,), [None], row_rules=RowRules(dim)))
        self._clear()

    @contextmanager
    def around_backward(self) -> Iterator[None]:
        """A backward after the step, whose checkpoints call the module again, records nothing."""
        if self._active is not None:  # the step itself calls it
            yield
            return
        with self._whole_step():
            yield
        if self.calls:
            call = self.calls[0]
            what = f"self.log({call.name!r})" if isinstance(call, LogCall) else "a metric's call"
            raise RuntimeError(
                "Expected a backward that logs and measures nothing, as it is not exchanged "
                f"between processes, got {what}: a checkpoint calls the module again. Log and "
                "measure in the step, outside of what is checkpointed."
            )

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While it lasts, nothing stands on the module: replicas follow its attributes."""
        active = self._active
        if active is not None:
            active.end()
        try:
            yield
        finally:
            if active is not None:
                active.begin()

    @contextmanager
    def _whole_step(self) -> Iterator[None]:
        self._clear()
        if self._structure is None or self._structure.has_changed():
            self._structure = ModuleStructure(self._module, self)
            self._follow([self._structure.modules])
        with self._recording([0]) as recording, replaced(self, _active=recording):
            yield
