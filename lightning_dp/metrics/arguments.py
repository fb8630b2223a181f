"""Arguments of a metric's calls on all replicas, joined into those of one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torchmetrics import CatMetric, MeanMetric, Metric, MetricCollection

from lightning_dp.metrics.one_call import StepAttributes
from lightning_dp.parallel.contexts import Contexts
from lightning_dp.parallel.gather import Join, RowRules, add_up, as_rows, fit_shapes
from lightning_dp.parallel.scatter import to_device, tree, weighted_mean
from lightning_dp.parallel.split import Order

AnyMetric: TypeAlias = Metric | MetricCollection
MetricMethod: TypeAlias = Literal["forward", "update", "reset"]


class MetricCall(NamedTuple):
    """A call that a replica made on the module's own metric; tensors are detached copies.

    `bound` is what the step had bound by then on the metric and on modules in it.
    """

    key: tuple[object, ...]  # equal for the same call on different replicas
    metric: AnyMetric
    method: MetricMethod
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    bound: Sequence[tuple[StepAttributes, Mapping[str, Any]]]

    def as_called(self, device: torch.device) -> Contexts:
        """While it lasts, the module's own metric has the attributes that it was called with."""
        return Contexts(attributes.as_at(values, device) for attributes, values in self.bound)


class MetricValue(NamedTuple):
    """Where a value comes from: the n-th `forward` of a metric in a step, and one of its leaves."""

    metric: AnyMetric
    call: int
    leaf: int

    def is_that(self, other: MetricValue | None) -> bool:
        """Whether it is the same one, on another replica."""
        return other is not None and self.metric is other.metric and self[1:] == other[1:]


def join_arguments(
    calls: Sequence[MetricCall],
    sizes: Sequence[int],
    device: torch.device,
    dim: int,
    order: Order | None = None,
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments one device would have passed; None where they cannot be told."""
    join = _JoinArguments(
        tuple(sizes),
        device,
        RowRules(dim),
        where=calls[0].key,
        order=order,
        warns=False,
        is_mean=_averages_numbers(calls[0]),
    )
    try:
        arguments: Any = join.node([to_device((c.args, c.kwargs), device) for c in calls], ())
    except _CannotJoin:
        return None
    return arguments if len(calls) == 1 or join.is_mean or join.of_samples else None


def _averages_numbers(call: MetricCall) -> bool:
    """Whether a number that is passed is the mean of a batch, of which the metric takes one.

    To other metrics a number is a sum, an extreme or a sample of its own, and a step that passes
    a weight beside it counts itself: all these are right call by call.
    """
    if len(call.args) + len(call.kwargs) != 1:
        return False
    metrics = [m for m in call.metric.modules() if isinstance(m, Metric)]
    return all([isinstance(m, MeanMetric | CatMetric) for m in metrics if not _wraps(m)])


def _wraps(metric: Metric) -> bool:
    """Whether it hands its calls on to other metrics."""
    return any([isinstance(m, AnyMetric) for m in metric.modules() if m is not metric])


class _CannotJoin(Exception):
    """The arguments of several calls have no joint meaning."""


@dataclass(frozen=True)
class _JoinArguments(Join):
    """Joins metric arguments; where what one device would have passed is in doubt, it refuses."""

    is_mean: bool = False  # numbers are means of batches
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
        if all(t.dim() == 0 for t in tensors) and self.is_mean:
            return weighted_mean([t.to(torch.get_default_dtype()) for t in tensors], self.sizes)
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

    def _plain(self, values: list[Any], path: tree.Path) -> Any:
        if self.is_mean and all(isinstance(value, int | float) for value in values):
            total = sum(self.sizes)
            return sum(v * n / total for v, n in zip(values, self.sizes, strict=True))
        if type(values[0]) is int:
            counts, are_sizes = add_up(values, self.sizes), tuple(values) == self.sizes
            if counts and are_sizes:
                return sum(values)
            if counts or (counts is None and are_sizes):
                raise _CannotJoin  # it may be the counts of equal shards: call by call is right
        if not all(tree.equal(value, values[0]) for value in values):
            raise _CannotJoin
        return values[0]
