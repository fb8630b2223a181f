"""The journal: what replicas say to the outside during a step, and its replay after the step.

Replicas write down their calls of `self.log` and of metrics, in the order in which they make them.
After the step the same calls of all replicas are joined and made once, on the main thread, on the
user's module.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any, NamedTuple, NoReturn, TypeAlias

import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_dp.lightning_private import batch_value, keep_batch_value, own_device
from lightning_dp.metrics.arguments import MetricCall
from lightning_dp.metrics.logs import LogCall, brought_to, log_call, merged_log
from lightning_dp.metrics.no_value import NoValue
from lightning_dp.metrics.one_call import StepAttributes, names_of_metric, state_of_metric
from lightning_dp.metrics.recorders import ReplicaMetrics, all_in
from lightning_dp.metrics.torchmetrics_on_replicas import is_metric, is_per_sample, replay
from lightning_dp.metrics.undo import MetricStates
from lightning_dp.parallel.batch import Shards, StepDims
from lightning_dp.parallel.contexts import Contexts, context
from lightning_dp.parallel.errors import add_note
from lightning_dp.parallel.replaced import StandIn, standing_in
from lightning_dp.parallel.replicas import ReplicaRules, Replicas
from lightning_dp.parallel.split import Order, batch_order
from lightning_dp.state import ModuleState

Call: TypeAlias = LogCall | MetricCall
Row: TypeAlias = dict[int, Any]
"""The same call of several replicas, by the number of the replica among those that work."""


class Journal:
    """The calls of one replica during one step.

    What is logged leaves some devices at once, for which the host waits before it is read.
    """

    def __init__(self, leaving: Collection[torch.device] = ()) -> None:
        self._leaving = leaving
        self.calls: list[Call] = []
        self.metrics: ReplicaMetrics | None = None

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Stands for `self.log` on a replica."""
        if isinstance(value, NoValue):
            value.fail()
        if self.metrics is not None and isinstance(value, nn.Module):
            value = self.metrics.original(value)
        self.calls.append(log_call(name, value, args, kwargs, self._leaving))


class _Log(NamedTuple):
    """A call of `self.log` that is still to be made, and a metric's value of the batch by then."""

    call: LogCall
    batch_value: Any


class Journals(ReplicaRules):
    """The journals of all replicas of a LightningModule.

    Attributes:
        replays: whether what the replicas say reaches the module.
    """

    def __init__(
        self,
        module: LightningModule,
        devices: Sequence[torch.device],
        output_device: torch.device,
    ) -> None:
        self._module = module
        self._output_device = output_device
        self._crosses = any(device != output_device for device in devices)
        leaving = devices if output_device.type == "cpu" else ()
        self._journals = [Journal(leaving) for _ in devices]
        self._devices = list(devices)
        self._submodules: list[list[nn.Module]] = []
        self._attributes: dict[int, StepAttributes] = {}
        self._metric_states = MetricStates()
        self._state = ModuleState(output_device, names_of_metric)
        self.replays = True

    def is_apart(self, module: nn.Module) -> bool:
        """Metrics are replicated wherever they are kept."""
        return is_metric(module)

    def stays(self, module: nn.Module) -> bool:
        """In forward mode, metrics are on the output device."""
        tensors = chain(module.parameters(), module.buffers())
        return any(tensor.device != self._devices[0] for tensor in tensors)

    def own_names(self, module: nn.Module) -> frozenset[str]:
        """A metric's state, which changes in every step."""
        return frozenset(state_of_metric(module, self._devices[0]))

    def own_attributes(
        self, module: nn.Module, twin: nn.Module, k: int, device: torch.device
    ) -> dict[str, Any]:
        """`self.device` and `self.log` of a replica, and the state of a metric."""
        own: dict[str, Any] = {**own_device(module, device), **state_of_metric(module, device)}
        if module is self._module:
            own["log"] = StandIn(twin, "log", self._journals[k].log)
        return own

    @context
    def around(
        self,
        replicas: Replicas,
        shards: Shards,
        is_rerun: bool = False,
    ) -> Iterator[None]:
        """Records while the replicas run; if all went well, replays.

        A rerun has done so before. It, and a step that did not fit and will run again, leave the
        module and its metrics as they were. Values are logged last: that cannot be undone.
        """
        for journal in self._journals:
            journal.calls.clear()
        self._follow(replicas.submodules)
        state = self._state
        state.begin(replicas.submodules, shards.active)
        logs: list[_Log] = []
        try:
            # Replica 0 is the user's module: it records only while the step lasts.
            own = self._journals[0]
            metrics = self._measuring(shards.active)
            measuring = Contexts(metrics) if self._attributes else nullcontext()
            with standing_in(self._module, "log", own.log), measuring:
                yield
            if is_rerun:
                state.undo()
            else:
                changes = state.changes(shards.active)  # not those of the calls that follow
                logs = self._replay(shards) if self.replays else logs
                state.settle(changes, replicas, shards)
        except torch.OutOfMemoryError:
            state.undo()
            self._metric_states.give_back()
            raise
        self._metric_states.drop()
        self._log(logs)

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

    def _measuring(self, active: Sequence[int]) -> Iterator[AbstractContextManager[None]]:
        """Contexts in which metrics record what the replicas that work do with them."""
        for attributes in self._attributes.values():
            attributes.begin_step()
        for k in active:
            metrics = self._journals[k].metrics
            if metrics is not None:
                metrics.weights_move = not self._module.automatic_optimization
                yield metrics.recording()

    def _replay(self, shards: Shards) -> list[_Log]:
        """Makes the calls of metrics; what is to be logged."""
        sizes, order = shards.active_sizes, shards.active_order
        journals: Sequence[list[Call]] = [self._journals[k].calls for k in shards.active]
        if self._crosses:
            journals = brought_to(self._output_device, journals)
        called = {c.metric: None for calls in journals for c in calls if isinstance(c, MetricCall)}
        if called:
            self._metric_states.keep(list(called))
        logs: list[_Log] = []
        for row in _aligned(journals, sizes, order, shards.dims):
            present = [sizes[i] for i in row]
            calls: list[Any] = list(row.values())
            if isinstance(calls[0], MetricCall):
                positions = None if order is None else [order[i] for i in row]
                self._replay_metric(calls, present, positions, shards.dims)
                continue
            if len(row) < len(journals):
                self._refuse(calls[0].name, row, shards)
            merged = merged_log(calls, present, self._output_device, shards.dims)
            logs.append(_Log(merged, batch_value(merged.value)))
        return logs

    def _log(self, logs: Sequence[_Log]) -> None:
        for call, value in logs:
            is_later = value is not (latest := batch_value(call.value))
            if is_later:
                keep_batch_value(call.value, value)
            try:
                self._module.log(call.name, call.value, **call.options)
            except torch.OutOfMemoryError as error:
                raise RuntimeError(
                    f"self.log({call.name!r}): expected room for the values that a step logs, got: "
                    f"{error} Make the batch smaller."
                ) from error
            if is_later:
                keep_batch_value(call.value, latest)

    def _replay_metric(
        self, calls: Sequence[MetricCall], sizes: Sequence[int], order: Order | None, dims: StepDims
    ) -> None:
        """Errors of a metric say which one: its call is not made where the step makes it."""
        try:
            replay(calls, sizes, order, dims)
        except BaseException as error:
            metric, modules = calls[0].metric, self._module.named_modules()
            name = next((name for name, module in modules if module is metric), "")
            of = f"the metric {name} ({type(metric).__qualname__})"
            add_note(error, f"[in {calls[0].method} of {of}, for the batch of all replicas]")
            raise

    def _refuse(self, key: str, present: Row, shards: Shards) -> NoReturn:
        names = [
            f"replica {k} on {self._devices[k]} ({shards.sizes[k]} samples)" for k in shards.active
        ]
        got = [name for i, name in enumerate(names) if i in present]
        missing = [name for i, name in enumerate(names) if i not in present]
        raise ValueError(
            f"self.log({key!r}): expected the same keys from every replica, got it from "
            f"{', '.join(got)}, but not from {', '.join(missing)}. Log it for every shard; "
            "a value that some shards lack can be logged through a torchmetrics metric."
        )


def _aligned(
    journals: Sequence[Sequence[Call]],
    sizes: Sequence[int],
    order: Order | None,
    dims: StepDims,
) -> list[Row]:
    """The replicas' calls side by side: the n-th call with a key stands beside the other n-th ones.

    They come in the order of the first replica; calls that it did not make come last. Calls of a
    metric that were made sample by sample stand alone, in the order of the batch.
    """
    rows: dict[tuple[tuple[object, ...], int], Row] = {}
    of_metrics: dict[tuple[object, ...], list[Row]] = {}
    for k, calls in enumerate(journals):
        counts: Counter[tuple[object, ...]] = Counter()
        for call in calls:
            row = rows.setdefault((call.key, counts[call.key]), {})
            if not row and isinstance(call, MetricCall):
                of_metrics.setdefault(call.key, []).append(row)
            row[k] = call
            counts[call.key] += 1
    alone = {
        key: _one_by_one(own, sizes, order)
        for key, own in of_metrics.items()
        if is_per_sample([list(row.values()) for row in own], sizes, dims)
    }
    aligned: list[Row] = []
    for (key, n), row in rows.items():
        if key not in alone:
            aligned.append(row)
        elif n == 0:
            aligned.extend(alone[key])
    return aligned


def _one_by_one(rows: list[Row], sizes: Sequence[int], order: Order | None) -> list[Row]:
    alone = [{k: row[k]} for k in range(len(sizes)) for row in rows if k in row]
    places = None if order is None or len(alone) != sum(sizes) else batch_order(order)
    return alone if places is None else [alone[i] for i in places]
