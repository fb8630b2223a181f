"""How many samples each device gets: functions of numbers alone.

Every function returns one size per device; the sizes sum to the batch size, and a size may be 0.
None loops over samples in Python: `by_cost` does so for the few that cost much, at most
`PLACED_SINGLY` per device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from heapq import heappop, heappush, heapreplace
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

Sizes: TypeAlias = tuple[int, ...]
Order: TypeAlias = Sequence[Sequence[int]]
"""For each shard the positions of its samples in the batch."""

Caps: TypeAlias = Sequence[int | None]
"""Of each device the most samples it can take; None for no limit."""

SplitPolicy: TypeAlias = Callable[[int], Sizes]
"""Batch size in, sizes out."""

PLACED_SINGLY = 128
"""`by_cost` places a sample by itself if it costs more than this part of a device's fair load."""

ROW = 1024  # samples whose costs are summed at once


def even(n: int, k: int) -> Sizes:
    """Sizes for n samples on k devices that differ by at most one, the larger ones first.

    Example:
        >>> even(30, 8), even(2, 4)
        ((4, 4, 4, 4, 4, 4, 3, 3), (1, 1, 0, 0))
    """
    share, rest = divmod(n, k)
    return (share + 1,) * rest + (share,) * (k - rest)


def chunk(n: int, k: int) -> Sizes:
    """The sizes of `torch.chunk` and `torch.nn.DataParallel`: ceil(n / k) while any is left.

    Example:
        >>> chunk(30, 8), chunk(9, 4)
        ((4, 4, 4, 4, 4, 4, 4, 2), (3, 3, 3, 0))
    """
    share = -(-n // k)
    return tuple(max(0, min(share, n - i * share)) for i in range(k))


def weighted(n: int, weights: Sequence[float]) -> Sizes:
    """Sizes in proportion to `weights`, rounded by the largest remainder (Hamilton's method).

    The arithmetic is exact; of equal remainders the earlier device wins, and weight 0 gets nothing.

    Args:
        n: the batch size, in samples.
        weights: one finite number of at least 0 per device, not all 0; only ratios matter.

    Example:
        >>> weighted(96, [1, 2, 3]), weighted(5, [1, 0, 1])
        ((16, 32, 48), (3, 0, 2))
    """
    exact = [Fraction(w) for w in weights]
    quotas = [n * w / sum(exact) for w in exact]
    sizes = [math.floor(q) for q in quotas]
    by_remainder = sorted(range(len(sizes)), key=lambda i: (sizes[i] - quotas[i], i))
    for i in by_remainder[: n - sum(sizes)]:
        sizes[i] += 1
    return tuple(sizes)


def minimax(
    n: int, fixed: Sequence[float], per_sample: Sequence[float], caps: Caps | None = None
) -> Sizes:
    """The sizes that make the slowest device as fast as possible.

    A device with m samples takes `fixed + per_sample * m`, and nothing if m is 0. The makespan (the
    largest of these times) is bisected down to neighbouring floats. Of devices that end at the
    makespan, the earlier ones get the samples.

    Args:
        n: the batch size, in samples.
        fixed: of each device, the time that a step takes however few the samples.
        per_sample: of each device, the time that each sample adds, at least 0.
        caps: of each device, the most samples it can take; None for no limit.

    Raises:
        ValueError: the caps leave room for fewer than n samples.

    Example:
        >>> minimax(64, [0, 0, 0, 0], [1, 1, 1, 4])
        (20, 20, 20, 4)
        >>> minimax(10, [0, 100], [1, 1]), minimax(10, [0, 0], [1, 1], caps=[2, None])
        ((10, 0), (2, 8))
    """
    limits = [n if cap is None else min(n, cap) for cap in caps or [None] * len(fixed)]
    if sum(limits) < n:
        raise ValueError(
            f"caps: expected room for {n} samples, got {limits}, which is room for {sum(limits)}. "
            "Make the batch smaller."
        )
    lines = list(zip(fixed, per_sample, limits, strict=True))
    usable = [line for line in lines if line[2] > 0]
    if not usable:
        return (0,) * len(lines)
    # No device ends a sample by `low`; all devices end all they can take by `high`.
    low, high = min(a + b for a, b, _ in usable) - 1, max(a + b * m for a, b, m in usable)
    while low < (middle := low + (high - low) / 2) < high:
        low, high = (low, middle) if sum(_samples_within(middle, lines)) >= n else (middle, high)
    sizes = _samples_within(low, lines)
    for i, most in enumerate(_samples_within(high, lines)):
        sizes[i] += min(most - sizes[i], n - sum(sizes))
    return tuple(sizes)


def _samples_within(seconds: float, lines: Sequence[tuple[float, float, int]]) -> list[int]:
    """The most samples that each device ends in this time, but for rounding."""
    sizes = []
    for fixed, per_sample, limit in lines:
        if limit < 1 or fixed + per_sample > seconds:
            sizes.append(0)
        elif fixed + per_sample * limit <= seconds:
            sizes.append(limit)
        else:
            sizes.append(min(limit, max(1, int((seconds - fixed) / per_sample))))
    return sizes


def fitted(wanted: Sizes, caps: Caps | None = None, least: int = 1) -> Sizes | None:
    """Sizes near the wanted ones, of which none is above its cap or between 0 and `least`.

    If there are not enough samples for all devices that were to have some, those that were to
    have most get them. Samples above a cap go to the other devices in proportion to their wanted
    sizes; a device that was to have none comes last.

    Returns:
        The sizes, with the same sum; None if the caps leave no room for such sizes.

    Example:
        >>> fitted((2, 1, 1, 1), least=2), fitted((7, 1), least=2), fitted((1, 0), least=2)
        ((3, 2, 0, 0), (6, 2), (1, 0))
        >>> fitted((32, 16, 16), caps=[28, None, None]), fitted((2, 1), caps=[2, 2], least=2)
        ((28, 18, 18), None)
    """
    n = sum(wanted)
    least = max(1, min(least, n))
    limits = [n if cap is None else min(n, cap) for cap in caps or [None] * len(wanted)]
    if all(
        size <= limit and not 0 < size < least for size, limit in zip(wanted, limits, strict=True)
    ):
        return wanted
    able = [i for i, limit in enumerate(limits) if limit >= least]
    count = max(1, min(n // least, sum(wanted[i] > 0 for i in able)))
    counts = [*range(count, len(able) + 1), *range(1, count)]
    # If any devices have room, then the same number of those with the largest caps has it, too.
    ranks: list[Callable[[int], tuple[int, int]]] = [
        lambda i: (-wanted[i], -limits[i]),
        lambda i: (-limits[i], -wanted[i]),
    ]
    choices = (sorted(able, key=rank)[:count] for rank in ranks for count in counts)
    fit = (some for some in choices if least * len(some) <= n <= sum(limits[i] for i in some))
    working = next(fit, None)
    if working is None:
        return None
    rates = [1 / wanted[i] if wanted[i] else 2.0 * n for i in working]
    more = minimax(
        n - least * len(working),
        [least * rate for rate in rates],
        rates,
        [limits[i] - least for i in working],
    )
    sizes = [0] * len(wanted)
    for i, extra in zip(working, more, strict=True):
        sizes[i] = least + extra
    return tuple(sizes)


class CostShares(NamedTuple):
    """A split by cost."""

    parts: Order  # ranges where a shard is a slice of the batch, else lists in ascending order
    loads: tuple[float, ...]  # of each device the sum of its costs


def by_cost(
    costs: Sequence[float] | Tensor, k: int, caps: Sequence[float] | None = None
) -> CostShares | None:
    """Shares out samples of unequal cost: which samples each of k devices gets.

    Samples that cost more than 1/128 of a device's fair load are placed one by one, the costliest
    first, each where the load is smallest (longest processing time first: at most 4/3 - 1/(3k) of
    the best possible, Graham 1969). The others are cut, in the batch's order, into one slice per
    device that levels the loads. So a large batch of samples of similar cost is not reordered.

    Args:
        costs: of each sample, in any unit, at least 0.
        k: the number of devices.
        caps: of each device, the largest sum of costs that it can take; None for no limits.

    Returns:
        The shares; None if the caps leave no room for them.

    Example:
        >>> by_cost([9, 1, 1, 1, 8, 4], 2)
        CostShares(parts=[[0, 1, 2, 3], [4, 5]], loads=(12.0, 12.0))
        >>> by_cost([1.0] * 300, 2).parts
        [range(0, 150), range(150, 300)]
    """
    costs = torch.as_tensor(costs, dtype=torch.float64)
    n, limits = len(costs), list(caps or [math.inf] * k)
    rows = _row_sums(costs)
    total = float(rows[-1])
    if not total:
        return CostShares(_ranges([0, *accumulate(even(n, k))]), (0.0,) * k)
    threshold = total / (k * PLACED_SINGLY)
    small, is_large = costs, None
    single: list[list[int]] = [[] for _ in range(k)]
    loads = [0.0] * k
    if float(costs.amax()) > threshold:
        is_large = costs > threshold
        small = costs.masked_fill(is_large, 0)
        rows = _row_sums(small)
        for sample, cost, i in _placed(is_large.nonzero().flatten(), costs, limits):
            if i is None:
                return None
            single[i].append(sample)
            loads[i] += cost
    level, dealt, ends = _level(loads, limits, float(rows[-1])), 0.0, [0]
    for i in range(k):
        end, reached = n, float(rows[-1])
        if i < k - 1:
            room = max(0.0, min(level, limits[i]) - loads[i])
            end, reached = _cut(small, rows, dealt + room, is_below=caps is not None)
        loads[i] += reached - dealt
        dealt = reached
        ends.append(end)
    # Sums of slices are rounded, each in its own way.
    if any(load > limit * (1 + 1e-12) for load, limit in zip(loads, limits, strict=True)):
        return None
    slices = _ranges(ends)
    if is_large is None:
        return CostShares(slices, tuple(loads))
    parts = []
    for own, piece in zip(single, slices, strict=True):
        inside = (~is_large[piece.start : piece.stop]).nonzero().flatten() + piece.start
        parts.append(sorted([*own, *inside.tolist()]))
    return CostShares(parts, tuple(loads))


def _row_sums(costs: Tensor) -> Tensor:
    """The sums of costs up to the end of each row of `ROW` samples; the last one may be shorter."""
    whole = len(costs) - len(costs) % ROW
    return torch.cat([costs[:whole].view(-1, ROW).sum(1), costs[whole:].sum()[None]]).cumsum(0)


def _ranges(ends: Sequence[int]) -> list[range]:
    return [range(start, end) for start, end in pairwise(ends)]


def _placed(
    samples: Tensor, costs: Tensor, limits: Sequence[float]
) -> Iterator[tuple[int, float, int | None]]:
    """Each sample, its cost, and the device that gets it; None where no device has room for it."""
    heap = [(0.0, 0, i) for i in range(len(limits))]  # load, samples, device
    ranked = samples[costs[samples].argsort(descending=True, stable=True)]
    for sample, cost in zip(ranked.tolist(), costs[ranked].tolist(), strict=True):
        full = []
        while heap and heap[0][0] + cost > limits[heap[0][2]]:
            full.append(heappop(heap))  # it may have room for a cheaper one
        if not heap:
            yield sample, cost, None
            return
        load, count, i = heap[0]
        yield sample, cost, i
        heapreplace(heap, (load + cost, count + 1, i))
        for entry in full:
            heappush(heap, entry)


def _level(loads: Sequence[float], limits: Sequence[float], more: float) -> float:
    """The load up to which devices are filled that have these loads and get `more` together."""
    low, high = min(loads), max(loads) + more
    while low < (middle := low + (high - low) / 2) < high:
        room = sum(
            max(0.0, min(middle, limit) - load) for load, limit in zip(loads, limits, strict=True)
        )
        low, high = (low, middle) if room >= more else (middle, high)
    return high


def _cut(costs: Tensor, rows: Tensor, load: float, *, is_below: bool) -> tuple[int, float]:
    """The end of the first samples that cost about this much, or at most this, and their sum."""
    row = int(torch.searchsorted(rows, load, right=True))
    start, before = row * ROW, float(rows[row - 1]) if row else 0.0
    sums = before + costs[start : start + ROW].cumsum(0)
    end = int(torch.searchsorted(sums, load, right=True))
    if end < len(sums) and not is_below:  # the nearer one
        end += float(sums[end]) - load < load - (float(sums[end - 1]) if end else before)
    return min(len(costs), start + end), float(sums[end - 1]) if end else before


def batch_order(order: Order) -> list[int]:
    """Where in the joined shards the samples of the batch are.

    Example:
        >>> batch_order([[1, 3], [0, 2]]), batch_order([[0], [5, 7]])
        ([2, 0, 3, 1], [0, 1, 2])
    """
    positions = [position for part in order for position in part]
    return sorted(range(len(positions)), key=positions.__getitem__)
