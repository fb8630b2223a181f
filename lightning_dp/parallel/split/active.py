"""How many devices work: the best of all splits where each further one costs something.

Pure arithmetic on ints and floats: no tensor, no device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from lightning_dp.parallel.split.arithmetic import Sizes, minimax
from lightning_dp.parallel.split.usage import Caps


def step_seconds(
    sizes: Sizes,
    fixed: Sequence[float],
    per_sample: Sequence[float],
    overhead: Sequence[float],
) -> float:
    """What a step takes by the cost model: its slowest device, and what the others that work add.

    A device with m samples takes `fixed + per_sample * m`, at the same time as all others. What is
    done one after another (Python, launches, weights and gradients over the root's link) is
    `overhead`, by the number of devices besides the root that work.

    Example:
        >>> step_seconds((4, 4, 0), [1, 1, 1], [1, 1, 1], overhead=[0, 2, 3])
        7
    """
    ends = [a + b * m for m, a, b in zip(sizes, fixed, per_sample, strict=True) if m]
    return max(ends, default=0) + overhead[sum(map(bool, sizes[1:]))]


def best_with(
    n: int,
    others: int,
    fixed: Sequence[float],
    per_sample: Sequence[float],
    caps: Caps | None = None,
) -> Sizes | None:
    """The sizes whose slowest device is fastest, with at most so many devices besides the root.

    None if the caps leave no room for n samples there.

    Example:
        >>> best_with(12, 1, [0, 0, 0], [1, 4, 1]), best_with(12, 0, [0, 0, 0], [1, 4, 1])
        ((6, 0, 6), (12, 0, 0))
    """
    limits = [n if cap is None else min(n, cap) for cap in caps or [None] * len(fixed)]
    lines = list(zip(fixed, per_sample, limits, strict=True))

    def chosen(limit: float) -> tuple[int, list[int]]:
        """How many samples devices end in so much time, and which others those are."""
        rooms = [_samples(*line, limit) for line in lines]
        ranked = sorted(range(1, len(rooms)), key=lambda k: (-rooms[k], k))[:others]
        return rooms[0] + sum(rooms[k] for k in ranked), ranked

    high = max((a + b * m for a, b, m in lines), default=0.0)
    if chosen(high)[0] < n:
        return None
    low = min(0.0, *fixed)
    # Down to neighbouring floats: the shortest time in which all samples are done, exactly.
    while low < (middle := low + (high - low) / 2) < high:
        low, high = (low, middle) if chosen(middle)[0] >= n else (middle, high)
    working = {0, *chosen(high)[1]}
    own = [m if k in working else 0 for k, m in enumerate(limits)]
    return minimax(n, fixed, per_sample, own)


def best_active(
    n: int,
    fixed: Sequence[float],
    per_sample: Sequence[float],
    overhead: Sequence[float],
    caps: Caps | None = None,
) -> Sizes:
    """The sizes with which a step takes least by the cost model, see `step_seconds`.

    All active sets and all sizes are searched, exactly.

    Args:
        n: the batch size, in samples.
        fixed: of each device, root first, the time that a step takes however few the samples.
        per_sample: of each device, the time that each sample adds, at least 0.
        overhead: what is done one after another, by the number of devices besides the root that
            work, from 0 to all; more devices never have less of it.
        caps: of each device, the most samples it can take; None for no limit.

    Raises:
        ValueError: the caps leave room for fewer than n samples.

    Example:
        >>> best_active(12, [0, 0, 0], [1, 1, 1], overhead=[0, 1, 2])
        (4, 4, 4)
        >>> best_active(12, [0, 0, 0], [1, 1, 1], overhead=[0, 1, 4])
        (6, 6, 0)
        >>> best_active(12, [5, 5, 5], [0, 0, 0], overhead=[0, 1, 4])
        (12, 0, 0)
    """
    found = (best_with(n, others, fixed, per_sample, caps) for others in range(len(fixed)))
    known = [sizes for sizes in found if sizes is not None]
    if not known:
        return minimax(n, fixed, per_sample, caps)  # which says what is wrong
    return min(known, key=lambda sizes: step_seconds(sizes, fixed, per_sample, overhead))


def between(known: Mapping[int, float], most: int) -> list[float]:
    """The overhead of 0 to `most` devices: on lines between those that are known, never falling.

    Example:
        >>> between({0: 1.0, 3: 4.0}, 3), between({0: 3.0, 2: 1.0}, 2)
        ([1.0, 2.0, 3.0, 4.0], [1.0, 1.0, 1.0])
    """
    counts = sorted(known)
    values = [min(known[later] for later in counts[i:]) for i in range(len(counts))]
    points = list(zip(counts, values, strict=True))
    overhead = []
    for count in range(most + 1):
        pairs = pairwise([(-1, points[0][1]), *points, (most + 1, points[-1][1])])
        (a, before), (b, after) = next((x, y) for x, y in pairs if x[0] <= count <= y[0])
        overhead.append(before + (after - before) * (count - a) / (b - a))
    return overhead


def _samples(fixed: float, per_sample: float, limit: int, seconds: float) -> int:
    """The most samples, up to a limit, with which a device ends in so many seconds."""
    if limit < 1 or fixed + per_sample > seconds:
        return 0
    if fixed + per_sample * limit <= seconds:
        return limit
    m = min(limit, math.floor((seconds - fixed) / per_sample))
    # Rounding may be off by one: the same sum decides as elsewhere.
    while m < limit and fixed + per_sample * (m + 1) <= seconds:
        m += 1
    while fixed + per_sample * m > seconds:
        m -= 1
    return m
