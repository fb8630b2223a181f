"""How many samples each device gets: arithmetic on plain numbers.

Every function returns one size per device; the sizes sum to the batch size, and a size may be 0.
No function's work grows with the number of samples, except `by_cost` and `batch_order`, which sort.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from fractions import Fraction
from heapq import heappop, heappush, heapreplace
from itertools import accumulate
from typing import TypeAlias

Sizes: TypeAlias = tuple[int, ...]
Order: TypeAlias = Sequence[Sequence[int]]
"""For each shard the positions of its samples in the batch."""

Caps: TypeAlias = Sequence[int | None]
"""Of each device the most samples it can take; None for no limit."""

SplitPolicy: TypeAlias = Callable[[int], Sizes]
"""Batch size in, sizes out."""

PLACED_SINGLY = 256
"""Samples per device that `by_cost` places one at a time; it deals the cheaper rest in blocks."""


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
    largest of these times) is bisected down to neighbouring floats, so the optimum is exact. Of
    devices that end at the makespan, the earlier ones get the samples.

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
    first_end = min(a + b for a, b, _ in usable)
    low, high = math.nextafter(first_end, -math.inf), max(a + b * m for a, b, m in usable)
    if sum(_samples_within(first_end, lines)) >= n:
        high = first_end
    while low < (middle := low + (high - low) / 2) < high:
        low, high = (low, middle) if sum(_samples_within(middle, lines)) >= n else (middle, high)
    sizes = _samples_within(low, lines)
    for i, most in enumerate(_samples_within(high, lines)):
        sizes[i] += min(most - sizes[i], n - sum(sizes))
    return tuple(sizes)


def _samples_within(seconds: float, lines: Sequence[tuple[float, float, int]]) -> list[int]:
    """The most samples that each device ends in so many seconds."""
    sizes = []
    for fixed, per_sample, limit in lines:
        if limit < 1 or fixed + per_sample > seconds:
            sizes.append(0)
            continue
        if fixed + per_sample * limit <= seconds:
            sizes.append(limit)
            continue
        m = min(limit, int((seconds - fixed) / per_sample))
        # The quotient is rounded and may be off by one; the sum is what counts.
        while m < limit and fixed + per_sample * (m + 1) <= seconds:
            m += 1
        while fixed + per_sample * m > seconds:
            m -= 1
        sizes.append(m)
    return sizes


def has_room(n: int, caps: Caps, least: int = 1) -> bool:
    """Whether devices with these caps can take n samples, each at least `least` or none.

    Example:
        >>> has_room(3, [2, 2], 1), has_room(3, [2, 2], 2), has_room(1, [2, 2], 2)
        (True, False, True)
    """
    return n == 0 or _roomiest(n, caps, min(least, n)) is not None


def _roomiest(n: int, caps: Caps, least: int) -> list[int] | None:
    """The fewest devices with room for n samples, at least `least` on each; None if there are none.

    If any devices have room, then the same number of those with the largest caps has it, too.
    """
    limits = [n if cap is None else cap for cap in caps]
    able = sorted((i for i, m in enumerate(limits) if m >= least), key=lambda i: (-limits[i], i))
    rooms = accumulate(limits[i] for i in able)
    counts = (j for j, room in enumerate(rooms, start=1) if least * j <= n <= room)
    count = next(counts, None)
    return None if count is None else able[:count]


def fitted(wanted: Sizes, caps: Caps | None = None, least: int = 1) -> Sizes | None:
    """Sizes near the wanted ones, of which none is above its cap or between 0 and `least`.

    A device that would have too few samples gives them to the others; if several would, some of
    them get `least`. A batch of fewer samples than `least` stays together. Samples above a cap go
    to the other devices in proportion to their wanted sizes; a device that was to have none comes
    last.

    Returns:
        The sizes, with the same sum; None if the caps leave no room for such sizes.

    Example:
        >>> fitted((2, 1, 1, 1), least=2), fitted((7, 1), least=2), fitted((1, 0), least=2)
        ((3, 2, 0, 0), (8, 0), (1, 0))
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
    able.sort(key=lambda i: (-wanted[i], -limits[i], i))
    enough = [i for i in able if wanted[i] >= least]
    spare = n - sum(wanted[i] for i in enough)
    count = min(len(enough) + spare // least, sum(wanted[i] > 0 for i in able))
    while count < len(able) and sum(limits[i] for i in able[:count]) < n:
        count += 1
    working: list[int] | None = able[:count]
    if least * count > n or sum(limits[i] for i in able[:count]) < n:
        working = _roomiest(n, limits, least)
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


def by_cost(costs: Sequence[float], k: int, caps: Sequence[float] | None = None) -> list[list[int]]:
    """Shares out samples of unequal cost: which samples each of k devices gets.

    The costliest sample comes first, and each goes to the device with the smallest load (longest
    processing time first: at most 4/3 - 1/(3k) of the best possible, Graham 1969). Without caps
    the rest, of which each sample is at most 1/256 of a load, is dealt in blocks that level them.

    Args:
        costs: of each sample, in any unit, at least 0.
        k: the number of devices.
        caps: of each device, the largest sum of costs that it can take; None for no limits.

    Returns:
        For each device the positions of its samples, in ascending order. A sample for which no
        device has room is nowhere.

    Example:
        >>> by_cost([9, 1, 1, 1, 8, 4], 2), by_cost([9, 1, 1], 2, caps=[5, 20])
        ([[0, 1, 2, 3], [4, 5]], [[1, 2], [0]])
    """
    order = sorted(range(len(costs)), key=costs.__getitem__, reverse=True)
    singly = order if caps else order[: PLACED_SINGLY * k]
    parts: list[list[int]] = [[] for _ in range(k)]
    heap = [(0.0, 0, i) for i in range(k)]  # load, samples, device
    for sample in singly:
        full = []
        while caps and heap and heap[0][0] + costs[sample] > caps[heap[0][2]]:
            full.append(heappop(heap))
        if heap:
            load, count, i = heap[0]
            parts[i].append(sample)
            heapreplace(heap, (load + costs[sample], count + 1, i))
        for entry in full:
            heappush(heap, entry)
    rest = order[len(singly) :]
    if rest:
        sums = list(accumulate(map(costs.__getitem__, rest), initial=0.0))
        level, start, dealt = (sum(load for load, *_ in heap) + sums[-1]) / k, 0, 0.0
        for load, _, i in heap[:-1]:
            dealt += level - load
            end = bisect_left(sums, dealt, start, len(rest))
            parts[i] += rest[start:end]
            start = end
        parts[heap[-1][2]] += rest[start:]
    return [sorted(part) for part in parts]


def batch_order(order: Order) -> list[int]:
    """Where in the joined shards the samples of the batch are.

    Example:
        >>> batch_order([[1, 3], [0, 2]])
        [2, 0, 3, 1]
    """
    positions = [position for part in order for position in part]
    return sorted(range(len(positions)), key=positions.__getitem__)
