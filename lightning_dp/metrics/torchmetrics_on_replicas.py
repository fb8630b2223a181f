"""torchmetrics used inside replicas give what one device gives.

Inside a step no metric accumulates, see `recorders`. After the step the calls of all replicas are
made once on the module's own metric, with their arguments joined in shard order: the very call that
one device would have made. Where arguments cannot be joined, the calls are made one after another
in shard order.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.wrappers import Running

from lightning_dp.lightning_private import batch_value, keep_batch_value, window_stays
from lightning_dp.metrics.arguments import AnyMetric, MetricCall, MetricValue, join_arguments
from lightning_dp.parallel.errors import add_note
from lightning_dp.parallel.scatter import to_device, tree
from lightning_dp.parallel.split import Order, batch_order

Key: TypeAlias = tuple[object, ...]
Row: TypeAlias = dict[int, Any]


def is_metric(module: nn.Module) -> bool:
    """Whether a module is a torchmetrics metric or a collection of them."""
    return isinstance(module, Metric | MetricCollection)


def replay(
    calls: Sequence[MetricCall],
    sizes: Sequence[int],
    order: Order | None,
    dim: int,
    module: nn.Module,
) -> Any:
    """Makes the same call of these replicas, in shard order, on the module's own metric.

    What that returns is returned.

    Errors say which one that is: the call is not made where the step makes it.
    """
    try:
        return _replay(calls, sizes, order, dim)
    except BaseException as error:
        metric = calls[0].metric
        name = next((name for name, own in module.named_modules() if own is metric), "")
        of = f"the metric {name} ({type(metric).__qualname__})"
        add_note(error, f"[in {calls[0].method} of {of}, for the batch of all replicas]")
        raise


def _replay(
    calls: Sequence[MetricCall], sizes: Sequence[int], order: Order | None, dim: int
) -> Any:
    metric, method = calls[0].metric, calls[0].method
    if method == "reset":
        return metric.reset()
    device = device_of(metric)
    try:
        return _call(calls, sizes, order, dim, device)
    except torch.OutOfMemoryError as error:
        raise torch.OutOfMemoryError(
            f"{type(metric).__qualname__}: expected room on {device} for a call with the whole "
            f"batch's arguments, got: {error}"
        ) from error


def _call(
    calls: Sequence[MetricCall],
    sizes: Sequence[int],
    order: Order | None,
    dim: int,
    device: torch.device,
) -> Any:
    metric, method = calls[0].metric, calls[0].method
    joined = join_arguments(calls, sizes, device, dim, order)
    with calls[0].as_called(device):
        if joined is None:
            _call_in_order(calls, device)
            return batch_value(metric) if isinstance(metric, Metric) else None
        args, kwargs = joined
        return metric(*args, **kwargs) if method == "forward" else metric.update(*args, **kwargs)


def standing_alone(
    rows_of: Mapping[Key, Sequence[Row]],
    sizes: Sequence[int],
    order: Order | None,
    dim: int,
) -> dict[Key, list[Row]]:
    """The calls of metrics that were made sample by sample, one in a row, in the batch's order.

    Each row has the n-th calls with one key, by the number of the replica.
    """
    return {
        key: _one_by_one(rows, sizes, order)
        for key, rows in rows_of.items()
        if _is_per_sample([list(row.values()) for row in rows], sizes, dim)
    }


def _is_per_sample(rows: Sequence[Sequence[Any]], sizes: Sequence[int], dim: int) -> bool:
    """Whether the replicas called a metric once per sample, or each a number of times of its own.

    Row n has the n-th calls of those replicas that made so many.
    """
    if any(len(row) < len(sizes) for row in rows):
        return True
    is_count = len(rows) > 1 and all(size == len(rows) for size in sizes)
    return is_count and join_arguments(rows[0], sizes, device_of(rows[0][0].metric), dim) is None


def _one_by_one(rows: Sequence[Row], sizes: Sequence[int], order: Order | None) -> list[Row]:
    alone = [{k: row[k]} for k in range(len(sizes)) for row in rows if k in row]
    places = None if order is None or len(alone) != sum(sizes) else batch_order(order)
    return alone if places is None else [alone[i] for i in places]


def device_of(metric: AnyMetric) -> torch.device:
    """Where a metric, or the first one of a collection, has its states."""
    members = [m for m in metric.modules() if isinstance(m, Metric)]
    return members[0].device


def _call_in_order(calls: Sequence[MetricCall], device: torch.device) -> None:
    metric = calls[0].metric
    moved = [(to_device(call.args, device), to_device(call.kwargs, device)) for call in calls]
    _update_in_order(metric, moved)
    if calls[0].method == "forward":
        for member in metric.modules():
            if isinstance(member, Metric):
                keep_batch_value(member, None)  # it may have a graph, which cannot be copied
        batch = copy.deepcopy(metric)
        batch.reset()
        _update_in_order(batch, moved)
        batch.compute()
        _take_batch_values(metric, batch)


def _update_in_order(metric: AnyMetric, arguments: Sequence[tuple[Any, Any]]) -> None:
    """One update for each shard; where a window counts updates, they are one: of the batch."""
    windows = [m for m in metric.modules() if isinstance(m, Running)]
    for n, (args, kwargs) in enumerate(arguments):
        if n:
            for window in windows:
                window_stays(window)
        metric.update(*args, **kwargs)


def _take_batch_values(metric: AnyMetric, batch: AnyMetric) -> None:
    """Gives a metric the value over this batch, as its own forward leaves it for the log."""
    for own, other in zip(metric.modules(), batch.modules(), strict=True):
        if isinstance(own, Metric) and isinstance(other, Metric) and other.update_called:
            keep_batch_value(own, other.compute())


Returned: TypeAlias = dict[int, list[Any]]
"""What calls of `forward` have returned for whole batches, by the ids of the metrics."""


def value_of_batch(sources: Sequence[MetricValue | None], returned: Returned) -> Any:
    """What a metric has returned for the whole batch, where replicas log what it has returned.

    None where they log values of other calls, or where it was called for a sample at a time.
    """
    first = sources[0]
    if first is None or not all([first.is_that(source) for source in sources]):
        return None
    calls = returned.get(id(first.metric), [])[first.call : first.call + 1]
    leaves = [leaf for value in calls for leaf in tree.leaves(value)]
    return leaves[first.leaf] if first.leaf < len(leaves) else None
