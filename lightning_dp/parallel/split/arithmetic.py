"""How many samples each device gets. Pure arithmetic on ints: no tensor, no device.

Every function returns one size per device; the sizes sum to the batch size, and a size may be 0.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import TypeAlias

Sizes: TypeAlias = tuple[int, ...]
Order: TypeAlias = Sequence[Sequence[int]]
"""For each shard the positions of its samples in the batch."""

SplitPolicy: TypeAlias = Callable[[int], Sizes]
"""Batch size in, sizes out."""


def even(n: int, k: int) -> Sizes:
    """Sizes that differ by at most one, the larger ones first.

    Args:
        n: the batch size, in samples.
        k: the number of devices.

    Example:
        >>> even(30, 8), even(2, 4)
        ((4, 4, 4, 4, 4, 4, 3, 3), (1, 1, 0, 0))
    """
    share, rest = divmod(n, k)
    return (share + 1,) * rest + (share,) * (k - rest)


def chunk(n: int, k: int) -> Sizes:
    """The sizes of `torch.chunk` (and `torch.nn.DataParallel`): ceil(n / k) while any is left.

    Args:
        n: the batch size, in samples.
        k: the number of devices.

    Example:
        >>> chunk(30, 8), chunk(9, 4)
        ((4, 4, 4, 4, 4, 4, 4, 2), (3, 3, 3, 0))
    """
    share = -(-n // k)
    return tuple(max(0, min(share, n - i * share)) for i in range(k))


def weighted(n: int, weights: Sequence[float]) -> Sizes:
    """Sizes in proportion to `weights`, rounded by the largest remainder (Hamilton's method).

    The arithmetic is exact, so the answer depends on nothing but the arguments; of equal
    remainders the earlier device wins, and a weight of zero gets nothing.

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


def unequal(sizes: Sizes, least: int = 1) -> Sizes:
    """Sizes of which not all are equal, as close to these as can be: what counts samples shows.

    A sample goes from the last device to the first; where the last would then have fewer than
    `least`, the others share all that it has. One device alone, or two with too little, stay.

    Example:
        >>> unequal((4, 4, 4)), unequal((4, 3)), unequal((1, 1, 1, 0)), unequal((2, 2), least=2)
        ((5, 4, 3), (4, 3), (2, 1, 0, 0), (2, 2))
    """
    active = [k for k, size in enumerate(sizes) if size]
    if len(active) < 2 or len({sizes[k] for k in active}) > 1:
        return sizes
    first, last, new = active[0], active[-1], list(sizes)
    if sizes[last] - 1 >= max(least, 1):
        new[first], new[last] = sizes[first] + 1, sizes[last] - 1
        return tuple(new)
    if len(active) == 2:
        return sizes
    shares = even(sum(sizes), len(active) - 1)
    for k, share in zip(active, (*shares, 0), strict=True):
        new[k] = share
    return unequal(tuple(new), least)


def reordered(order: Order, sizes: Sizes) -> Order:
    """The same samples in shards of other sizes: where there are too many, the last ones go.

    Example:
        >>> reordered([[0, 3], [1, 2]], (3, 1))
        [[0, 2, 3], [1]]
    """
    pairs = list(zip(order, sizes, strict=True))
    spare = [i for part, size in pairs for i in part[size:]]
    return [sorted([*part[:n], *(spare.pop() for _ in range(n - len(part)))]) for part, n in pairs]


def minimax(
    n: int,
    fixed: Sequence[float],
    per_sample: Sequence[float],
    caps: Sequence[int | None] | None = None,
) -> Sizes:
    """The sizes that make the slowest device as fast as possible.

    A device with m samples takes `fixed + per_sample * m`, and nothing if m is 0. The largest of
    these times is minimised, exactly: every next sample goes where it ends first. Times of a
    device only grow with its samples, so the n earliest ends of all devices together are an
    optimal split, and no other has an earlier last end. Of equal ends the earlier device wins.

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
            f"caps: expected room for {n} samples, got {list(limits)}, which is room for "
            f"{sum(limits)}. Make the batch smaller."
        )
    sizes = [0] * len(limits)
    ends = [(fixed[i] + per_sample[i], i) for i, limit in enumerate(limits) if limit > 0]
    heapq.heapify(ends)
    for _ in range(n):
        _, i = ends[0]
        sizes[i] += 1
        if sizes[i] < limits[i]:
            heapq.heapreplace(ends, (fixed[i] + per_sample[i] * (sizes[i] + 1), i))
        else:
            heapq.heappop(ends)
    return tuple(sizes)


class CostSplit:
    """A split by what the samples cost; without costs it is even."""

    def __init__(self, k: int) -> None:
        self._k = k

    def __call__(self, n: int) -> Sizes:
        """The sizes for n samples of equal cost."""
        return even(n, self._k)

    def order(self, costs: Sequence[float], caps: Sequence[float] | None = None) -> Order | None:
        """For each device the positions of its samples; None if the caps leave no room."""
        parts = by_cost(costs, self._k, caps=caps)
        return parts if sum(map(len, parts)) == len(costs) else None


def batch_order(order: Order) -> list[int] | None:
    """Where in the joined shards the samples of the batch are; None if that is its own order.

    Example:
        >>> batch_order([[1, 3], [0, 2]]), batch_order([[0], [5, 7]])
        ([2, 0, 3, 1], None)
    """
    positions = [position for part in order for position in part]
    if positions == sorted(positions):
        return None
    return sorted(range(len(positions)), key=positions.__getitem__)


def by_cost(
    costs: Sequence[float],
    k: int,
    speeds: Sequence[float] | None = None,
    caps: Sequence[float] | None = None,
) -> list[list[int]]:
    """Shares out samples of unequal cost: which samples each device gets.

    The costliest sample comes first, and each goes to the device that would finish it first
    (longest processing time first: at equal speeds at most 4/3 - 1/(3k) of the best possible,
    Graham 1969). Of devices that finish at the same time, one with fewer samples wins.

    Args:
        costs: of each sample, in any unit, at least 0.
        k: the number of devices.
        speeds: of each device, costs per time, more than 0; None for equal speeds.
        caps: of each device, the largest sum of costs that it can take; None for no limits.

    Returns:
        For each device the positions of its samples, in ascending order. Samples for which no cap
        leaves room are nowhere.

    Example:
        >>> by_cost([9, 1, 1, 1, 8, 4], 2)
        [[0, 1, 2, 3], [4, 5]]
        >>> by_cost([6, 6, 6], 2, speeds=[2, 1])
        [[0, 2], [1]]
    """
    rates = [1.0] * k if speeds is None else list(speeds)
    loads = [0.0] * k
    parts: list[list[int]] = [[] for _ in range(k)]
    for sample in sorted(range(len(costs)), key=lambda i: -costs[i]):
        finishes = [
            ((loads[j] + costs[sample]) / rates[j], len(parts[j]), j)
            for j in range(k)
            if caps is None or loads[j] + costs[sample] <= caps[j]
        ]
        if not finishes:
            continue
        j = min(finishes)[2]
        loads[j] += costs[sample]
        parts[j].append(sample)
    return [sorted(part) for part in parts]
