"""Records what replicas log and measure during a step, and replays it once after the step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_dp.lightning_private import own_device
from lightning_dp.metrics.logged_values import LogCall, MetricAt, as_number, check_keys, merged_log
from lightning_dp.metrics.replica import (
    Call,
    MetricCall,
    RecordedMetric,
    Recording,
    ReplicaRecord,
    is_metric,
    metrics_in,
    names_of_metric,
    never,
    state_of_metric,
)
from lightning_dp.parallel.contexts import StandIn
from lightning_dp.parallel.devices import replica_names, replica_text
from lightning_dp.parallel.errors import add_note
from lightning_dp.parallel.replicate import ReplicaRules, Replicas
from lightning_dp.parallel.scatter import Shards, tree
from lightning_dp.parallel.split import Order
from lightning_dp.state import ModuleState, warn_of_step

if TYPE_CHECKING:
    from lightning_dp.parallel.processes import World


class Records(NamedTuple):
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
    """

    def __init__(
        self,
        module: LightningModule,
        devices: Sequence[torch.device],
        output_device: torch.device,
        world: World | None = None,
    ) -> None:
        self._module, self._devices = module, list(devices)
        self._output_device = output_device
        self.world = world
        names = replica_names(devices, None if self.world is None else self.world.rank)
        self._names = [replica_text(k, names) for k in range(len(names))]
        self._varying: set[str] = set()  # logged names whose batch_size differs between shards
        self._warned: set[int] = set()  # metrics that only some replicas have updated
        leaving = {*self._devices} if output_device.type == "cpu" else set[torch.device]()
        leaving.discard(output_device)
        self._records = [ReplicaRecord(device, leaving) for device in devices]
        self.recording: Recording
        self._submodules: list[list[nn.Module]] = []
        self._state = ModuleState(output_device, names_of_metric)

    # How metrics are replicated

    def has_own_buffer_rules(self, module: nn.Module) -> bool:
        """Metrics are replicated wherever they are kept."""
        return is_metric(module)

    def keeps_root_tensors(self, module: nn.Module) -> bool:
        """In forward mode, metrics are on the output device."""
        tensors = chain(module.parameters(), module.buffers())
        return any(tensor.device != self._devices[0] for tensor in tensors)

    def own_attributes(
        self, module: nn.Module, twin: nn.Module, k: int, device: torch.device
    ) -> dict[str, Any]:
        """A replica's `self.device` and `self.log`; a metric's state, and the recorder of it."""
        own: dict[str, Any] = {**own_device(module, device), **state_of_metric(module, device)}
        if module is self._module:
            own["log"] = StandIn(twin, "log", self._records[k].log)
        elif is_metric(module):
            own |= RecordedMetric(self._records[k], twin).methods
        return own

    # A step

    @contextmanager
    def around(
        self, replicas: Replicas, name: str, shards: Shards, is_rerun: bool = False
    ) -> Iterator[None]:
        """Records while the replicas run; if all went well, replays.

        A rerun has replayed before. It, and a step that ran out of memory and will run again, leave
        the module as it was.
        """
        self.follow(replicas.submodules)
        self._state.begin(replicas, shards.active)
        try:
            try:
                with self.recording:
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
                self.replay(shards)
            except torch.OutOfMemoryError as error:  # what was logged cannot be taken back
                where = "".join(getattr(error, "__notes__", ()))
                raise RuntimeError(
                    "Expected room for what a step logs and measures of the whole batch, got: "
                    f"{error} {where} Make the batch smaller."
                ) from error
        finally:
            for record in self._records:
                record.clear()

    def follow(self, submodules: list[list[nn.Module]]) -> None:
        """Finds the metrics of all replicas, if these are others than before."""
        if submodules is not self._submodules:
            self._submodules = submodules
            for record, own in zip(self._records, submodules, strict=True):
                record.follow(own)
            first = self._records[0]
            metrics = [RecordedMetric(first, m) for m in submodules[0] if is_metric(m)]
            # Replica 0 is the user's module: it records only while a step lasts.
            self.recording = Recording(self._module, first, metrics)

    def replay(self, shards: Shards) -> None:
        """Makes the merged calls, in the order of the first replica."""
        calls = [self._records[k].calls for k in shards.active]
        if self.world is None and not any(calls):
            return
        names = [f"{self._names[k]} ({shards.sizes[k]} samples)" for k in shards.active]
        found = Records(calls, shards.active_sizes, shards.active_order, names)
        logging: AbstractContextManager[None] = nullcontext()
        if self.world is not None:
            from lightning_dp.metrics import ranks

            found = ranks.of_all_ranks(found, self.world)
            logging = ranks.logging_for_all(self._module, sum(found.sizes))
        with logging:
            self._make(found, shards.row_rules.dim)

    def _make(self, found: Records, dim: int) -> None:
        """Makes the calls: those of metrics, and then those of `self.log`, which may log these."""
        measured: dict[int, list[list[MetricCall]]] = {}
        logged: dict[tuple[str, int], dict[int, LogCall]] = {}  # the n-th calls of all replicas
        for k, calls in enumerate(found.calls):
            counts: dict[str, int] = {}
            for call in calls:
                if isinstance(call, LogCall):
                    n = counts[call.name] = counts.get(call.name, -1) + 1
                    logged.setdefault((call.name, n), {})[k] = call
                else:
                    measured.setdefault(call.metric, [[] for _ in found.calls])[k].append(call)
        returned = {n: self._measure(n, calls, found, dim) for n, calls in measured.items()}
        for row in logged.values():
            self._log(row, found, returned)

    def _log(
        self, row: Mapping[int, LogCall], found: Records, returned: Mapping[int, list[Any]]
    ) -> None:
        """Makes one call of `self.log` for all replicas."""
        calls = list(row.values())
        if len(row) < len(found.replicas):
            check_keys(calls[0].name, row, found.replicas)
        merged = merged_log(calls, found.sizes, self._output_device, self._varying)
        if merged.source is not None:
            merged = _with_value_of_batch(merged, calls, returned, self._output_device)
        value = merged.value
        if isinstance(value, MetricAt):
            value = self._submodules[0][value.number]
        self._module.log(merged.name, value, **merged.options)

    def _measure(
        self, number: int, calls: Sequence[Sequence[MetricCall]], found: Records, dim: int
    ) -> list[Any]:
        """Makes the replicas' calls of a metric; returns what `forward` has for the whole batch."""
        from lightning_dp.metrics.replay import Batch, joined_calls, replay

        metric: Any = self._submodules[0][number]
        self._warn_of_missing(number, calls, found.replicas)
        joined = joined_calls(calls, Batch(found.sizes, found.order, dim), metric)
        for member in metrics_in(metric) if self.world is not None else ():
            member.distributed_available_fn = never
        returned = []
        for own in joined:
            try:
                value = replay(own, metric)
            except Exception as error:
                where = f"{own[0].method} of {self._described(number)}"
                add_note(error, f"[in {where}, for the batch of all replicas]")
                raise
            returned.extend([value] * (own[0].method == "forward"))
        # Of calls for a sample at a time no value is the batch's.
        return returned if len(joined) == max(map(len, calls)) else []

    def _warn_of_missing(
        self, number: int, calls: Sequence[Sequence[MetricCall]], replicas: Sequence[str]
    ) -> None:
        """Names a metric, once, that some replicas have updated and others have not."""
        have = [any(call.method != "reset" for call in own) for own in calls]
        if number in self._warned or len(set(have)) < 2:
            return
        self._warned.add(number)
        names = {
            did: ", ".join(name for name, own in zip(replicas, have, strict=True) if own == did)
            for did in (True, False)
        }
        warn_of_step(
            self._module,
            f"{self._described(number)}: a step has updated it on {names[True]}, but not on "
            f"{names[False]}, whose samples it does not see. If the step leaves it out for small "
            "batches (if len(x) > 1), have it updated always: it gets the whole batch.",
        )

    def _described(self, number: int) -> str:
        metric = self._submodules[0][number]
        path = next((name for name, own in self._module.named_modules() if own is metric), "")
        return f"the metric {path} ({type(metric).__qualname__})"


def _with_value_of_batch(
    merged: LogCall,
    calls: Sequence[LogCall],
    returned: Mapping[int, list[Any]],
    device: torch.device,
) -> LogCall:
    """Where replicas log what a metric has returned: what it has returned for the whole batch.

    Not where they log values of other calls, or where it was called for a sample at a time.
    """
    source = merged.source
    if source is None or any(call.source != source for call in calls):
        return merged
    values = returned.get(source.metric, [])[source.call : source.call + 1]
    leaves = [leaf for value in values for leaf in tree.leaves(value)][source.leaf :]
    if not leaves:
        return merged
    is_number = isinstance(leaves[0], Tensor)
    return merged._replace(value=as_number(leaves[0], device) if is_number else leaves[0])
