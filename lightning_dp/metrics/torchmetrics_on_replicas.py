"""torchmetrics used inside replicas give what one device gives.

Inside a step no metric accumulates. Calls of `update`, `forward` and `reset` are written to the
replica's journal, and after the step they are made once on the module's own metric, with the
arguments of all replicas joined in shard order: the very call that one device would have made.
Where arguments cannot be joined, the calls are made one after another in shard order.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_dp.lightning_private import keep_batch_value
from lightning_dp.metrics.arguments import AnyMetric, MetricCall, MetricMethod, join_arguments
from lightning_dp.parallel.batch import StepDims, to_device, tree
from lightning_dp.parallel.replaced import StandIn, replaced
from lightning_dp.parallel.split import Order
from lightning_dp.parallel.torch_private import (
    buffer_table,
    child_table,
    parameter_table,
    tables_as_attributes,
)

_SHADOWED = ("forward", "update", "compute", "reset")


def is_metric(module: nn.Module) -> bool:
    """Whether a module is a torchmetrics metric or a collection of them."""
    return isinstance(module, Metric | MetricCollection)


def replay(
    calls: Sequence[MetricCall], sizes: Sequence[int], order: Order | None, dims: StepDims
) -> None:
    """Makes the same call of these replicas, in shard order, on the module's own metric."""
    metric, method = calls[0].metric, calls[0].method
    if method == "reset":
        metric.reset()
        return
    device = _device(metric)
    joined = join_arguments(calls, sizes, device, dims, order)
    if joined is None:
        _call_in_order(calls, device)
    else:
        args, kwargs = joined
        metric(*args, **kwargs) if method == "forward" else metric.update(*args, **kwargs)


def is_per_sample(rows: Sequence[Sequence[Any]], sizes: Sequence[int], dims: StepDims) -> bool:
    """Whether the replicas called a metric once per sample, or each a number of times of its own.

    Row n has the n-th calls of those replicas that made so many.
    """
    if any(len(row) < len(sizes) for row in rows):
        return True
    is_count = len(rows) > 1 and all(size == len(rows) for size in sizes)
    return is_count and join_arguments(rows[0], sizes, _device(rows[0][0].metric), dims) is None


class MetricFaces:
    """Metric objects that a replica sees in the place of the module's own.

    A face has the class and the attributes of the metric that it stands for, and a recorder of
    its own. Replica 0, which is the module itself, wears the recorders only during a step.
    """

    def __init__(self, record: Callable[[MetricCall], None], device: torch.device) -> None:
        self._record = record
        self._device = device
        self._originals: dict[int, AnyMetric] = {}
        self._recorders: dict[int, _Recorder] = {}

    def original(self, value: Any) -> Any:
        """The module's own metric, if `value` is a face of it; else `value`."""
        return self._originals.get(id(value), value)

    def make(self, metric: nn.Module) -> nn.Module:
        """A face of `metric`, with faces of the metrics in it."""
        face = copy.copy(metric)
        children = {
            name: self.make(child) if child is not None and is_metric(child) else child
            for name, child in child_table(metric).items()
        }
        tables = tables_as_attributes(parameter_table(metric), buffer_table(metric), children)
        face.__dict__.update(tables)
        if isinstance(metric, Metric | MetricCollection):
            self._originals[id(face)] = metric
            face.__dict__.update(_Recorder(metric, self._record, self._device).shadows(face))
        return face

    @contextlib.contextmanager
    def worn(self, leaves: Sequence[nn.Module]) -> Iterator[None]:
        """While it lasts, the metrics in `leaves` record instead of accumulating."""
        metrics = [
            m for leaf in leaves for m in leaf.modules() if isinstance(m, Metric | MetricCollection)
        ]
        with contextlib.ExitStack() as stack:
            for metric in metrics:
                stack.enter_context(replaced(metric, **self._recorder(metric).shadows(metric)))
            yield

    def _recorder(self, metric: AnyMetric) -> _Recorder:
        if id(metric) not in self._recorders:
            self._recorders[id(metric)] = _Recorder(metric, self._record, self._device)
        return self._recorders[id(metric)]


class _Recorder:
    """Writes down the calls that one replica makes on one metric."""

    def __init__(
        self, metric: AnyMetric, record: Callable[[MetricCall], None], device: torch.device
    ) -> None:
        self._metric = metric
        self._record = record
        self._device = device
        self._scratch: AnyMetric | None = None

    def shadows(self, wearer: nn.Module) -> dict[str, Callable[..., Any]]:
        """What stands in front of a metric's own methods; a copy of it has its own ones there."""
        return {name: StandIn(wearer, name, getattr(self, name)) for name in _SHADOWED}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The value over the replica's own samples: that of all samples comes after the step."""
        self._append("forward", args, kwargs)
        if self._scratch is None:
            self._scratch = copy.deepcopy(self._metric).to(self._device)
        self._scratch.reset()
        try:
            return self._scratch(*args, **kwargs)
        except Exception:
            # Too few samples, perhaps: then there is no value over this shard. If the arguments
            # are at fault, the call on the module's own metric raises the same error.
            nan = torch.tensor(math.nan)
            if isinstance(self._scratch, MetricCollection):
                return dict.fromkeys(self._scratch.keys(keep_base=False), nan)
            return nan

    def update(self, *args: Any, **kwargs: Any) -> None:
        self._append("update", args, kwargs)

    def reset(self) -> None:
        self._append("reset", (), {})

    def compute(self) -> Any:
        raise RuntimeError(
            f"Expected compute() of {type(self._metric).__qualname__} to be called after the step: "
            "during it a replica knows only its own samples. Log the metric object with "
            "self.log(name, metric), or call compute() in an epoch-end hook."
        )

    def _append(self, method: MetricMethod, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        key = ("metric", id(self._metric), method)
        self._record(MetricCall(key, self._metric, method, _snapshot(args), _snapshot(kwargs)))


def _snapshot(arguments: Any) -> Any:
    """Detached copies: what the step does to its tensors afterwards must not matter."""
    return tree.map_leaves(
        lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, arguments
    )


def _device(metric: AnyMetric) -> torch.device:
    members = [m for m in metric.modules() if isinstance(m, Metric)]
    return members[0].device


def _call_in_order(calls: Sequence[MetricCall], device: torch.device) -> None:
    metric = calls[0].metric
    moved = [(to_device(call.args, device), to_device(call.kwargs, device)) for call in calls]
    for args, kwargs in moved:
        metric.update(*args, **kwargs)
    if calls[0].method == "forward":
        batch = copy.deepcopy(metric)
        batch.reset()
        for args, kwargs in moved:
            batch.update(*args, **kwargs)
        batch.compute()
        _take_batch_values(metric, batch)


def _take_batch_values(metric: AnyMetric, batch: AnyMetric) -> None:
    """Gives a metric the value over this batch, as its own forward leaves it for the log."""
    for own, other in zip(metric.modules(), batch.modules(), strict=True):
        if isinstance(own, Metric) and isinstance(other, Metric) and other.update_called:
            keep_batch_value(own, other.compute())
