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
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torchmetrics import CatMetric, MeanMetric, Metric, MetricCollection

from lightning_dp.parallel import tree
from lightning_dp.parallel.gather import weighted_mean
from lightning_dp.parallel.transfer import to_device

AnyMetric: TypeAlias = Metric | MetricCollection
MetricMethod: TypeAlias = Literal["forward", "update", "reset"]

_SHADOWED = ("forward", "update", "compute", "reset")


@dataclass(frozen=True)
class MetricCall:
    """A call that a replica made on its metric; tensors are detached copies.

    Attributes:
        metric: the module's own metric, on which the call is to be made.
        method: `"forward"`, `"update"` or `"reset"`.
        args: positional arguments.
        kwargs: keyword arguments.
    """

    metric: AnyMetric
    method: MetricMethod
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for the same call on different replicas."""
        return ("metric", id(self.metric), self.method)


def is_metric(module: nn.Module) -> bool:
    """Whether a module is a torchmetrics metric or a collection of them."""
    return isinstance(module, Metric | MetricCollection)


def replay(calls: Sequence[MetricCall], sizes: Sequence[int]) -> None:
    """Makes one call of all replicas on the module's own metric.

    Args:
        calls: the same call of each replica that made it, in shard order.
        sizes: samples of these replicas.
    """
    metric, method = calls[0].metric, calls[0].method
    if method == "reset":
        metric.reset()
        return
    device = _device(metric)
    joined = _join_arguments(calls, sizes, device)
    if joined is None:
        _call_in_order(calls, device)
    else:
        args, kwargs = joined
        metric(*args, **kwargs) if method == "forward" else metric.update(*args, **kwargs)


def is_per_sample(rows: Sequence[Sequence[MetricCall]], sizes: Sequence[int]) -> bool:
    """Whether the replicas called a metric once per sample, or each a number of times of its own.

    Args:
        rows: for each n, the n-th calls of those replicas that made so many.
        sizes: samples of all replicas that worked.
    """
    if any(len(row) < len(sizes) for row in rows):
        return True
    is_count = len(rows) > 1 and all(size == len(rows) for size in sizes)
    return is_count and _join_arguments(rows[0], sizes, _device(rows[0][0].metric)) is None


class MetricFaces:
    """Metric objects that a replica sees in the place of the module's own.

    A face has the class and the attributes of the metric that it stands for, and a recorder of
    its own. Replica 0, which is the module itself, wears the recorders only during a step.

    Args:
        record: takes the calls that the replica makes.
        device: the replica's device.
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
        face.__dict__["_modules"] = {
            name: self.make(child) if child is not None and is_metric(child) else child
            for name, child in metric._modules.items()
        }
        if isinstance(metric, Metric | MetricCollection):
            self._originals[id(face)] = metric
            face.__dict__.update(_Recorder(metric, self._record, self._device).shadows())
        return face

    @contextlib.contextmanager
    def worn(self, leaves: Sequence[nn.Module]) -> Iterator[None]:
        """While it lasts, the metrics in `leaves` record instead of accumulating."""
        metrics = [
            m for leaf in leaves for m in leaf.modules() if isinstance(m, Metric | MetricCollection)
        ]
        own = [{n: m.__dict__[n] for n in _SHADOWED if n in m.__dict__} for m in metrics]
        for metric in metrics:
            metric.__dict__.update(self._recorder(metric).shadows())
        try:
            yield
        finally:
            for metric, attributes in zip(metrics, own, strict=True):
                for name in _SHADOWED:
                    metric.__dict__.pop(name, None)
                metric.__dict__.update(attributes)

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

    def __deepcopy__(self, memo: dict[int, Any]) -> _Recorder:
        """Copying a metric that wears this recorder does not copy what hangs on it."""
        return self

    def shadows(self) -> dict[str, Callable[..., Any]]:
        """What stands in front of a metric's own methods."""
        return {name: getattr(self, name) for name in _SHADOWED}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The value over the replica's own samples: that of all samples comes after the step."""
        self._append("forward", args, kwargs)
        if self._scratch is None:
            self._scratch = _bare(copy.deepcopy(self._metric)).to(self._device)
        self._scratch.reset()
        try:
            return self._scratch(*args, **kwargs)
        except Exception:
            # Too few samples, perhaps: then there is no value over this shard. If the arguments
            # are at fault, the call on the module's own metric raises the same error.
            return _no_value(self._scratch)

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
        self._record(MetricCall(self._metric, method, _snapshot(args), _snapshot(kwargs)))


def _snapshot(arguments: Any) -> Any:
    """Detached copies: what the step does to its tensors afterwards must not matter."""
    return tree.map_leaves(
        lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, arguments
    )


def _bare(metric: AnyMetric) -> AnyMetric:
    """A copied metric without the recorders that the original wore."""
    for module in metric.modules():
        for name in _SHADOWED:
            if isinstance(getattr(module.__dict__.get(name), "__self__", None), _Recorder):
                del module.__dict__[name]
    return metric


def _no_value(metric: AnyMetric) -> Any:
    if isinstance(metric, MetricCollection):
        return {name: torch.tensor(math.nan) for name in metric.keys(keep_base=False)}
    return torch.tensor(math.nan)


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
            own._forward_cache = other.compute()


def _join_arguments(
    calls: Sequence[MetricCall], sizes: Sequence[int], device: torch.device
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments one device would have passed; None where they cannot be told."""
    join = _Join(tuple(sizes), device, _averages_numbers(calls[0]))
    try:
        args = join.node([call.args for call in calls])
        kwargs = join.node([call.kwargs for call in calls])
    except _CannotJoin:
        return None
    return (args, kwargs) if len(calls) == 1 or join.is_of_samples else None


def _averages_numbers(call: MetricCall) -> bool:
    """Whether a number that is passed is the mean of a batch, of which the metric takes one.

    To other metrics a number is a sum, an extreme or a sample of its own, and a step that passes
    a weight beside it counts itself: all these are right call by call.
    """
    is_mean = isinstance(call.metric, MeanMetric | CatMetric)
    return is_mean and len(call.args) + len(call.kwargs) == 1


class _CannotJoin(Exception):
    """The arguments of several calls have no joint meaning."""


class _Join:
    """Joins metric arguments; the nodes of one position are all of one kind, or cannot be."""

    def __init__(
        self, sizes: tuple[int, ...], device: torch.device, averages_numbers: bool
    ) -> None:
        self._sizes = sizes
        self._device = device
        self._averages_numbers = averages_numbers
        self.is_of_samples = averages_numbers
        """Whether something was joined: equal numbers alone may be counts or constants."""

    def node(self, nodes: list[Any]) -> Any:
        first = nodes[0]
        if len(nodes) == 1:
            return to_device(first, self._device)
        if any(type(node) is not type(first) for node in nodes):
            raise _CannotJoin
        if isinstance(first, Tensor):
            return self._tensors([node.to(self._device) for node in nodes])
        if isinstance(first, list) and tuple(map(len, nodes)) == self._sizes:
            self.is_of_samples = True
            return [to_device(item, self._device) for node in nodes for item in node]
        if tree.children(first) is not None:
            return self._children(nodes)
        return self._plain(nodes)

    def _children(self, nodes: list[Any]) -> Any:
        columns = [tree.children(node) or [] for node in nodes]
        keys = [[key for key, _ in column] for column in columns]
        if any(k != keys[0] for k in keys):
            raise _CannotJoin
        values = [self.node([c[i][1] for c in columns]) for i in range(len(keys[0]))]
        return tree.rebuild(nodes[0], values)

    def _tensors(self, tensors: list[Tensor]) -> Tensor:
        if all(t.dim() == 0 for t in tensors) and self._averages_numbers:
            return weighted_mean([t.to(torch.get_default_dtype()) for t in tensors], self._sizes)
        if any(t.dim() == 0 or t.shape[1:] != tensors[0].shape[1:] for t in tensors):
            raise _CannotJoin
        if not self._has_rows([t.size(0) for t in tensors]):
            raise _CannotJoin
        self.is_of_samples = True
        return torch.cat(tensors)

    def _has_rows(self, lengths: list[int]) -> bool:
        """Whether these lengths count samples, or tokens of samples, and not classes, say."""
        if len(set(lengths)) > 1:
            return True
        return all(length % n == 0 for length, n in zip(lengths, self._sizes, strict=True)) and (
            len(set(self._sizes)) == 1
        )

    def _plain(self, values: list[Any]) -> Any:
        if tuple(values) == self._sizes and not self._averages_numbers:
            return sum(values)
        if self._averages_numbers and all(isinstance(value, int | float) for value in values):
            total = sum(self._sizes)
            return sum(v * n / total for v, n in zip(values, self._sizes, strict=True))
        if any(value != values[0] for value in values):
            raise _CannotJoin
        return values[0]
