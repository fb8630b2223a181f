"""Recorded calls of a metric, made once on the user's own metric with the whole batch.

The arguments of all replicas are joined in shard order: it is the very call that one device would
have made. Where they cannot be joined, or replicas made different numbers of calls, the calls are
made one after another in shard order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torchmetrics import CatMetric, MaxMetric, MeanMetric, Metric, MinMetric, SumMetric

from lightning_dp.lightning_private import keep_batch_value
from lightning_dp.metrics.replica import AnyMetric, MetricCall, is_metric, metrics_in, reset_copy
from lightning_dp.parallel.gather import Join, RowRules, add_up, as_rows, fit_shapes
from lightning_dp.parallel.scatter import to_device, tree, weighted_mean
from lightning_dp.parallel.split import Order

Numbers: TypeAlias = Literal["mean", "sum", "max", "min"]
Arguments: TypeAlias = tuple[tuple[Any, ...], Mapping[str, Any]]


@dataclass
class Batch:
    """Where the samples of the replicas that work are in the batch."""

    sizes: Sequence[int]
    order: Order | None
    dim: int


def joined_calls(
    records: Sequence[Sequence[MetricCall]], batch: Batch, metric: AnyMetric
) -> list[list[MetricCall]]:
    """The calls to make for those that replicas made of a metric.

    Args:
        records: each replica's calls, in order.
        batch: the samples of the replicas.
        metric: the user's own metric.

    Returns:
        Lists of calls that are one: a call with the whole batch, or one of each replica's.
    """
    rows = list(zip(*records, strict=False))
    are_alike = all(len(calls) == len(rows) for calls in records) and all(
        len({call.method for call in row}) == 1 for row in rows
    )
    found = [_joined(row, batch, metric) for row in rows] if are_alike else []
    of_samples = len(rows) > 1 and all(size == len(rows) for size in batch.sizes)
    if not are_alike or (of_samples and len(found[0]) > 1):  # made for a sample at a time
        first, *others = records
        rest = [[c] for calls in others for c in calls if c.method != "reset"]
        return [[call] for call in first] + rest
    return found


def _joined(row: Sequence[MetricCall], batch: Batch, metric: AnyMetric) -> list[MetricCall]:
    """The same call of all replicas as one with the whole batch; else as they are."""
    if row[0].method == "reset":
        return [row[0]]
    joined = joined_arguments(row, batch, metric)
    return list(row) if joined is None else [row[0]._replace(args=joined[0], kwargs=joined[1])]


def replay(calls: Sequence[MetricCall], metric: AnyMetric) -> Any:
    """Makes calls that are one on the user's own metric; returns what that returns.

    Of several calls of `forward` the value is that of a metric which has seen nothing else.
    """
    device = device_of(metric)
    arguments = [to_device((call.args, dict(call.kwargs)), device) for call in calls]
    if len(calls) == 1:
        args, kwargs = arguments[0]
        return getattr(metric, calls[0].method)(*args, **kwargs)
    for args, kwargs in arguments:
        metric.update(*args, **kwargs)
    if calls[0].method == "update":
        return None
    alone = reset_copy(metric)
    for args, kwargs in arguments:
        alone.update(*args, **kwargs)
    value = alone.compute()
    for member, other in zip(metrics_in(metric), metrics_in(alone), strict=True):
        keep_batch_value(member, other.compute() if other.update_called else None)
    return value


def device_of(metric: AnyMetric) -> torch.device:
    """Where a metric, or the first one of a collection, has its states."""
    return next(m.device for m in metrics_in(metric))


def joined_arguments(
    calls: Sequence[MetricCall], batch: Batch, metric: AnyMetric
) -> Arguments | None:
    """The arguments one device would have passed; None where that cannot be known."""
    device = device_of(metric)
    join = _JoinArguments(
        tuple(batch.sizes),
        device,
        RowRules(batch.dim),
        where=(calls[0].metric, calls[0].method),
        order=batch.order,
        warns=False,
        numbers=_meaning_of_numbers(calls[0], metric),
    )
    try:
        nodes = [to_device((call.args, dict(call.kwargs)), device) for call in calls]
        arguments: Any = join.node(nodes, ())
    except _CannotJoin:
        return None
    return arguments if len(calls) == 1 or join.numbers or join.of_samples else None


def _meaning_of_numbers(call: MetricCall, metric: AnyMetric) -> Numbers | None:
    """What a number is that is passed to torchmetrics' own aggregators.

    None for other metrics, and for a step that passes a weight beside it, which counts itself:
    these calls are right one after another.
    """
    if len(call.args) + len(call.kwargs) != 1:
        return None
    wrapped = [m for m in metrics_in(metric) if not any(map(is_metric, m.children()))]
    kinds: dict[Numbers, tuple[type[Metric], ...]] = {
        "mean": (MeanMetric, CatMetric),
        "sum": (SumMetric,),
        "max": (MaxMetric,),
        "min": (MinMetric,),
    }
    for numbers, kind in kinds.items():
        if all([isinstance(m, kind) for m in wrapped]):
            return numbers
    return None


class _CannotJoin(Exception):
    """The arguments of several calls have no joint meaning."""


@dataclass(frozen=True)
class _JoinArguments(Join):
    """Joins metric arguments; where what one device would have passed is in doubt, it refuses."""

    numbers: Numbers | None = None
    # Where something was joined: equal numbers alone may be counts or constants.
    of_samples: list[tree.Path] = field(default_factory=list)

    def node(self, nodes: list[Any], path: tree.Path, override: Any = None) -> Any:
        if len(nodes) == 1:
            return nodes[0]
        keys = [[key for key, _ in tree.children(node) or ()] for node in nodes]
        is_list = isinstance(nodes[0], list)
        if len({type(node) for node in nodes}) > 1 or not (
            is_list or keys.count(keys[0]) == len(keys)
        ):
            raise _CannotJoin
        return super().node(nodes, path)

    def are_of_samples(self, nodes: list[Any], path: tree.Path) -> bool:
        are = isinstance(nodes[0], list) and super().are_of_samples(nodes, path)
        self.of_samples.extend([path] * are)
        return are

    def leaves(self, leaves: list[Any], path: tree.Path) -> Any:
        if isinstance(leaves[0], Tensor):
            return self._tensors(as_rows(leaves, self.sizes), path)
        return self._plain(leaves, path)

    def _tensors(self, tensors: list[Tensor], path: tree.Path) -> Tensor:
        if self.numbers and all(t.dim() == 0 for t in tensors):
            return self._number([t.to(torch.get_default_dtype()) for t in tensors])
        if any(t.dim() == 0 for t in tensors):
            raise _CannotJoin
        how, dim = fit_shapes([t.shape for t in tensors], self.sizes, self.row_rules.dim)
        if how == "same" and all(tree.equal(tensors[0], t) for t in tensors):
            return tensors[0]
        if how in ("same", "ragged"):
            raise _CannotJoin
        self.of_samples.append(path)
        joined: Tensor = self.in_order(
            torch.cat(tensors, dim), [t.shape[dim] for t in tensors], dim
        )
        return joined

    def _number(self, numbers: list[Tensor]) -> Tensor:
        if self.numbers == "mean":
            return weighted_mean(numbers, self.sizes)
        reduce: Any = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}[self.numbers or ""]
        reduced: Tensor = reduce(torch.stack(numbers), 0)
        return reduced

    def _plain(self, values: list[Any], path: tree.Path) -> Any:
        if self.numbers and all(isinstance(value, int | float) for value in values):
            return self._number([torch.tensor(v, dtype=torch.float64) for v in values]).item()
        if type(values[0]) is int:
            counts, are_sizes = add_up(values, self.sizes), tuple(values) == self.sizes
            if counts and are_sizes:
                return sum(values)
            if counts or (counts is None and are_sizes):
                raise _CannotJoin  # it may be the counts of equal shards: call by call is right
        if not all(tree.equal(value, values[0]) for value in values):
            raise _CannotJoin
        return values[0]
