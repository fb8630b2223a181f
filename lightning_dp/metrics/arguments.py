"""Arguments of a metric's calls on all replicas, joined into those of one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torchmetrics import CatMetric, MeanMetric, Metric, MetricCollection

from lightning_dp.parallel.batch import as_rows, to_device, tree, weighted_mean
from lightning_dp.parallel.split import Order, batch_order

AnyMetric: TypeAlias = Metric | MetricCollection
MetricMethod: TypeAlias = Literal["forward", "update", "reset"]


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


def join_arguments(
    calls: Sequence[MetricCall],
    sizes: Sequence[int],
    device: torch.device,
    order: Order | None = None,
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments one device would have passed; None where they cannot be told."""
    join = _Join(tuple(sizes), device, _averages_numbers(calls[0]), order)
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
        self,
        sizes: tuple[int, ...],
        device: torch.device,
        averages_numbers: bool,
        order: Order | None,
    ) -> None:
        self._sizes = sizes
        self._places = None if order is None else batch_order(order)
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
            items = [to_device(item, self._device) for node in nodes for item in node]
            return items if self._places is None else [items[i] for i in self._places]
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
        tensors = as_rows(tensors, self._sizes)
        if all(t.dim() == 0 for t in tensors) and self._averages_numbers:
            return weighted_mean([t.to(torch.get_default_dtype()) for t in tensors], self._sizes)
        if any(t.dim() == 0 or t.shape[1:] != tensors[0].shape[1:] for t in tensors):
            raise _CannotJoin
        if not self._has_rows([t.size(0) for t in tensors]):
            raise _CannotJoin
        self.is_of_samples = True
        joined = torch.cat(tensors)
        if self._places is None or len(joined) != len(self._places):
            return joined
        return joined[torch.tensor(self._places, device=joined.device)]

    def _has_rows(self, lengths: list[int]) -> bool:
        """Whether these lengths count samples, or tokens of samples, and not classes, say."""
        if len(set(lengths)) > 1:
            return True
        return all(length % n == 0 for length, n in zip(lengths, self._sizes, strict=True)) and (
            len(set(self._sizes)) == 1
        )

    def _plain(self, values: list[Any]) -> Any:
        if type(values[0]) is int and tuple(values) == self._sizes and not self._averages_numbers:
            if len(set(values)) == 1:
                raise _CannotJoin  # the counts of equal shards, or a constant: call by call is both
            return sum(values)
        if self._averages_numbers and all(isinstance(value, int | float) for value in values):
            total = sum(self._sizes)
            return sum(v * n / total for v, n in zip(values, self._sizes, strict=True))
        if any(value != values[0] for value in values):
            raise _CannotJoin
        return values[0]
