"""How many samples each device gets: functions of numbers alone.

Every function returns one size per device; the sizes sum to the batch size, and a size may be 0.
None loops over samples in Python, but for `by_cost` in batches of at most `PLACED_SINGLY`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from heapq import heapreplace
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

Sizes: TypeAlias = tuple[int, ...]
Order: TypeAlias = Sequence[Sequence[int]]
"""For each shard the positions of its samples in the batch."""

Caps: TypeAlias = Sequence[int | None]
"""Of each device the most samples it can take; None for no limit."""

SplitPolicy: TypeAlias = Callable[[int], Sizes]
"""Batch size in, sizes out. Some also have a method `learn(step)` or `parts(costs)`."""

NEAR = 1.01
"""`by_cost` keeps the batch's order if the fullest device has at most this times the optimum."""

PLACED_SINGLY = 8192
"""In larger batches `by_cost` places no sample by itself: slices are nearly as good there."""


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

    parts: Order  # ranges where shards are slices of the batch, else lists in ascending order
    loads: tuple[float, ...]  # of each device the sum of its costs


def by_cost(costs: Sequence[float] | Tensor, k: int) -> CostShares:
    """Shares out samples of unequal cost: which samples each of k devices gets.

    The rule: slices of the batch in its own order, if the fullest device has at most `NEAR` times
    the least load that is possible; else the costliest sample first, each to the device that has
    least to do. Batches of more than `PLACED_SINGLY` samples are always cut into slices. No device
    gets more than a fair share and one sample.

    Args:
        costs: of each sample, in any unit, at least 0.
        k: the number of devices.

    Example:
        >>> by_cost([9, 1, 1, 1, 8, 4], 2)
        CostShares(parts=[range(0, 4), range(4, 6)], loads=(12.0, 12.0))
        >>> by_cost([9, 8, 1, 1, 1, 4], 2)
        CostShares(parts=[[0, 2, 3, 4], [1, 5]], loads=(12.0, 12.0))
    """
    costs = torch.as_tensor(costs, dtype=torch.float64)
    n, sums = len(costs), costs.cumsum(0)
    total = float(sums[-1]) if n else 0.0
    ends = [*accumulate(even(n, k))]
    if total:
        # Each slice ends where the sum is nearest to the goal: a multiple of a fair share.
        goals = torch.arange(1, k, dtype=torch.float64) * (total / k)
        after = torch.searchsorted(sums, goals)
        before = torch.where(after > 0, sums[after - 1], 0.0)
        ends = [*(after + (sums[after] - goals <= goals - before)).tolist(), n]
    at_ends = [float(sums[end - 1]) if end else 0.0 for end in ends]
    loads = tuple(b - a for a, b in pairwise([0.0, *at_ends]))
    slices = CostShares([range(a, b) for a, b in pairwise([0, *ends])], loads)
    if n > PLACED_SINGLY or max(loads) <= NEAR * max(total / k, float(costs.amax()) if n else 0.0):
        return slices
    parts: list[list[int]] = [[] for _ in range(k)]
    heap = [(0.0, 0, i) for i in range(k)]  # load, samples, device
    ranked = costs.argsort(descending=True, stable=True)
    for sample, cost in zip(ranked.tolist(), costs[ranked].tolist(), strict=True):
        load, count, i = heap[0]
        parts[i].append(sample)
        heapreplace(heap, (load + cost, count + 1, i))
    heap.sort(key=itemgetter(2))
    return CostShares([sorted(part) for part in parts], tuple(load for load, _, _ in heap))


def batch_order(order: Order) -> list[int]:
    """Where in the joined shards the samples of the batch are.

    Example:
        >>> batch_order([[1, 3], [0, 2]]), batch_order([[0], [5, 7]])
        ([2, 0, 3, 1], [0, 1, 2])
    """
    positions = [position for part in order for position in part]
    return sorted(range(len(positions)), key=positions.__getitem__)
