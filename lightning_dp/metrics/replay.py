"""Recorded calls of a metric, made once on the user's own metric with the whole batch.

The arguments of all replicas are joined in shard order: it is the very call that one device would
have made. Where they cannot be joined, the calls are made one after another in shard order.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor
from torchmetrics import CatMetric, MaxMetric, MeanMetric, Metric, MinMetric, SumMetric

from lightning_dp.lightning_private import batch_value, keep_batch_value
from lightning_dp.metrics.replica_metrics import AnyMetric, Call, MetricCall, is_metric
from lightning_dp.parallel.gather import Join, RowRules, add_up, as_rows, fit_shapes
from lightning_dp.parallel.scatter import to_device, tree, weighted_mean
from lightning_dp.parallel.split import Order, batch_order

Row: TypeAlias = dict[int, Call]
"""The same call of several replicas, by the number of the replica among those that work."""

Numbers: TypeAlias = Literal["mean", "sum", "max", "min"]


@dataclass
class Batch:
    """Where the samples of the replicas that work are in the batch."""

    sizes: Sequence[int]
    order: Order | None
    dim: int

    def of(self, present: Iterable[int]) -> Batch:
        """The same for some of the replicas."""
        present = list(present)
        order = None if self.order is None else [self.order[i] for i in present]
        return Batch([self.sizes[i] for i in present], order, self.dim)


def aligned(records: Sequence[Sequence[Call]], batch: Batch, metrics: Sequence[Any]) -> list[Row]:
    """The replicas' calls side by side: the n-th call with a key stands beside the other n-th ones.

    They come in the order of the first replica; calls that it did not make come last. A metric's
    calls that were made sample by sample stand alone, in the order of the batch.
    """
    rows: dict[tuple[tuple[Any, ...], int], Row] = {}
    for k, calls in enumerate(records):
        counts: Counter[tuple[Any, ...]] = Counter()
        for call in calls:
            rows.setdefault((call.key, counts[call.key]), {})[k] = call
            counts[call.key] += 1
    by_key: dict[tuple[Any, ...], list[Row]] = {}
    for (key, _), row in rows.items():
        by_key.setdefault(key, []).append(row)
    alone = {
        key: _one_by_one(own, batch)
        for key, own in by_key.items()
        if key[0] != "log" and _are_of_samples(own, batch, metrics[key[0]])
    }
    found: list[Row] = []
    for (key, n), row in rows.items():
        if key not in alone:
            found.append(row)
        elif n == 0:
            found.extend(alone[key])
    return found


def _are_of_samples(rows: Sequence[Row], batch: Batch, metric: AnyMetric) -> bool:
    """Whether replicas called a metric once per sample, or each a number of times of its own."""
    if any(len(row) < len(batch.sizes) for row in rows):
        return True
    counts = len(rows) > 1 and all(size == len(rows) for size in batch.sizes)
    return counts and joined_arguments(_calls(rows[0]), batch, metric) is None


def _calls(row: Row) -> list[MetricCall]:
    return [cast(MetricCall, call) for call in row.values()]


def _one_by_one(rows: Sequence[Row], batch: Batch) -> list[Row]:
    alone = [{k: row[k]} for k in range(len(batch.sizes)) for row in rows if k in row]
    is_whole = batch.order is not None and len(alone) == sum(batch.sizes)
    places = batch_order(batch.order or ()) if is_whole else None
    return alone if places is None else [alone[i] for i in places]


def replay(calls: Sequence[MetricCall], batch: Batch, metric: AnyMetric) -> Any:
    """Makes the same call of these replicas on the user's own metric; returns what that returns."""
    if calls[0].method == "reset":
        return metric.reset()
    joined = joined_arguments(calls, batch, metric)
    if joined is not None:
        args, kwargs = joined
        return (
            metric(*args, **kwargs)
            if calls[0].method == "forward"
            else metric.update(*args, **kwargs)
        )
    device = device_of(metric)
    moved = [to_device((call.args, dict(call.kwargs)), device) for call in calls]
    for args, kwargs in moved:
        metric.update(*args, **kwargs)
    if calls[0].method == "update":
        return None
    # The batch's value is that of a metric which sees nothing else.
    members = [member for member in metric.modules() if isinstance(member, Metric)]
    for member in members:
        keep_batch_value(member, None)  # it may have a graph, which cannot be copied
    alone = copy.deepcopy(metric)
    alone.reset()
    for args, kwargs in moved:
        alone.update(*args, **kwargs)
    alone.compute()
    for member, other in zip(members, filter(is_metric, alone.modules()), strict=False):
        if isinstance(other, Metric) and other.update_called:
            keep_batch_value(member, other.compute())
    return batch_value(metric)


def device_of(metric: AnyMetric) -> torch.device:
    """Where a metric, or the first one of a collection, has its states."""
    return next(m.device for m in metric.modules() if isinstance(m, Metric))


def joined_arguments(
    calls: Sequence[MetricCall], batch: Batch, metric: AnyMetric
) -> tuple[tuple[Any, ...], Mapping[str, Any]] | None:
    """The arguments one device would have passed; None where that cannot be known."""
    device = device_of(metric)
    join = _JoinArguments(
        tuple(batch.sizes),
        device,
        RowRules(batch.dim),
        where=calls[0].key,
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
    members = [m for m in metric.modules() if isinstance(m, Metric)]
    wrapped = [m for m in members if not any(is_metric(x) and x is not m for x in m.modules())]
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
