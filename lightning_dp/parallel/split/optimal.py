"""Sizes that are the best there are: the least largest time, within limits, or by cost."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor

Sizes: TypeAlias = tuple[int, ...]
"""The number of samples of each device; zeros allowed."""

Caps: TypeAlias = Sequence[int | None]
"""Of each device the most samples it can take; None for no limit."""


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
    pairs = zip(wanted, limits, strict=True)
    if all(size <= limit and not 0 < size < least for size, limit in pairs):
        return wanted
    able = [i for i, limit in enumerate(limits) if limit >= least]
    most = min(n // least, len(able))
    count = min(most, sum(wanted[i] > 0 for i in able))
    by_wish = sorted(able, key=lambda i: (-wanted[i], -limits[i]))
    by_room = sorted(able, key=lambda i: -limits[i])  # the first `most` of these have most room
    choices = [*(by_wish[:m] for m in range(count, most + 1)), by_room[:most]]
    working = next((some for some in choices if n <= sum(limits[i] for i in some)), None)
    if working is None:
        return None
    rates = [1 / wanted[i] if wanted[i] else 2.0 * n for i in working]
    room = [limits[i] - least for i in working]
    more = minimax(n - least * len(working), [least * rate for rate in rates], rates, room)
    sizes = [0] * len(wanted)
    for i, extra in zip(working, more, strict=True):
        sizes[i] = least + extra
    return tuple(sizes)


def by_cost(costs: Sequence[float] | Tensor, k: int) -> Sizes:
    """The sizes of k consecutive shards that cost about the same.

    Each shard ends where the sum of the costs is nearest to its goal, a multiple of a fair share:
    none costs more than a fair share and one sample.

    Args:
        costs: of each sample, in any unit, at least 0.
        k: the number of devices.

    Example:
        >>> by_cost([9, 1, 1, 1, 8, 4], 2)
        (4, 2)
    """
    sums = torch.as_tensor(costs, dtype=torch.float64).cumsum(0)
    n = len(sums)
    if not n or not sums[-1]:
        return by_cost([1.0] * n, k) if n else (0,) * k
    goals = torch.arange(1, k, dtype=torch.float64) * (float(sums[-1]) / k)
    after = torch.searchsorted(sums, goals).clamp(max=n - 1)
    before = torch.where(after > 0, sums[after - 1], 0.0)
    ends = (after + (sums[after] - goals <= goals - before)).tolist()
    return tuple(b - a for a, b in pairwise([0, *ends, n]))
