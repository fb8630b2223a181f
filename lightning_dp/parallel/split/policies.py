"""The splits that people choose by name, by shares, or by a function of their own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, TypeAlias

from lightning_dp.parallel.split.adaptive import Adaptive
from lightning_dp.parallel.split.arithmetic import (
    CostSplit,
    Sizes,
    SplitPolicy,
    chunk,
    even,
    weighted,
)
from lightning_dp.parallel.split.memory import Capacities, Memory

OwnSplit: TypeAlias = Callable[[int, Sequence[Any]], Sequence[int]]
"""`(batch_size, devices) -> sizes`, one size per device."""

_FIXED: dict[str, Callable[[int, int], Sizes]] = {"even": even, "chunk": chunk}
SPLITS = (*_FIXED, "memory", "adaptive", "cost")


def check_split(
    split: str | OwnSplit, weights: Sequence[float] | None, sample_cost: str | None = None
) -> None:
    """Raises a ValueError where these options are wrong whatever the devices are."""
    if not callable(split) and split not in SPLITS:
        raise ValueError(
            f"split: expected one of {sorted(SPLITS)} or a function (batch_size, devices) -> "
            f"sizes, got {split!r}. Use 'even', or weights=[...] for fixed shares."
        )
    if sample_cost is not None and split != "cost":
        raise ValueError(
            f"sample_cost: expected None with split={split!r}, got {sample_cost!r}. "
            "Use split='cost', or leave it out."
        )
    if weights is None:
        return
    if split != "even":
        raise ValueError(
            f"weights: expected None with split={split!r}, got {list(weights)}. "
            "Leave out one of the two: weights are a split of their own."
        )
    wrong = [w for w in weights if not _is_weight(w)]
    if wrong or not any(weights):
        raise ValueError(
            f"weights: expected finite numbers of at least 0, not all 0, got {list(weights)}. "
            "Give each device its share, such as [1, 3, 3, 3]."
        )


def split_policy(
    split: str | OwnSplit,
    weights: Sequence[float] | None,
    devices: Sequence[Any],
    capacities: Capacities | None = None,
) -> SplitPolicy:
    """The function that splits every batch over the devices.

    What the devices are matters to a function of the user's alone.

    Example:
        >>> split_policy("even", [1, 2, 3], ["cpu"] * 3)(12)
        (2, 4, 6)
        >>> split_policy(lambda n, devices: (n - 1, 1), None, ["cpu"] * 2)(12)
        (11, 1)
    """
    check_split(split, weights)
    k = len(devices)
    if callable(split):
        return partial(_checked, split, list(devices))
    if split == "cost":
        return CostSplit(k)
    if split == "adaptive":
        return Adaptive(k)
    if split == "memory":
        if capacities is None:
            raise ValueError(
                "split='memory': expected capacities, the bytes that each device has, got None. "
                "Give a function that returns them."
            )
        capacities()  # raises an error now where devices do not count their memory
        return Memory([list(devices).index(device) for device in devices], capacities)
    if weights is None:
        return partial(_fixed_sizes, split, k)
    shares = tuple(weights)
    if len(shares) != k:
        raise ValueError(
            f"weights: expected {k} numbers, one per device, got {len(shares)}: {list(shares)}. "
            "Give every device a weight (0 leaves it idle)."
        )
    return partial(_weighted_sizes, shares)


@lru_cache(maxsize=256)
def _fixed_sizes(split: str, k: int, n: int) -> Sizes:
    return _FIXED[split](n, k)


@lru_cache(maxsize=256)
def _weighted_sizes(shares: tuple[float, ...], n: int) -> Sizes:
    return weighted(n, shares)


def _checked(split: OwnSplit, devices: Sequence[Any], n: int) -> Sizes:
    """The answer of a user's function."""
    sizes, k = split(n, list(devices)), len(devices)
    are_sizes = isinstance(sizes, Sequence) and all(_is_size(size) for size in sizes)
    if not are_sizes or len(sizes) != k or sum(sizes) != n:
        raise ValueError(
            f"split: expected {k} integers of at least 0, one per device, with sum {n}, from "
            f"{getattr(split, '__qualname__', split)}({n}, devices), got {sizes!r}. Return a size "
            "for every device; 0 leaves it idle."
        )
    return tuple(int(size) for size in sizes)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_weight(value: object) -> bool:
    return _is_size(value) or (isinstance(value, float) and math.isfinite(value) and value >= 0)
