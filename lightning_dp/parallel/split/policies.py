"""The options `split`, `weights` and `sample_cost`: their checks, and the policy that they name."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from numbers import Integral, Real
from typing import Any, TypeAlias

from lightning_dp.parallel.checks import short_repr
from lightning_dp.parallel.split.adaptive import Adaptive
from lightning_dp.parallel.split.arithmetic import Sizes, SplitPolicy, chunk, even, weighted
from lightning_dp.parallel.split.auto import Auto
from lightning_dp.parallel.split.memory import Capacities, Memory
from lightning_dp.parallel.split.planner import CostSplit

OwnSplit: TypeAlias = Callable[[int, Sequence[Any]], Sequence[int]]
"""`(batch_size, devices) -> sizes`, one size per device."""

SPLITS = ("even", "chunk", "auto", "memory", "adaptive", "cost")


def check_split(
    split: str | OwnSplit,
    weights: Sequence[float] | None,
    sample_cost: str | None = None,
    *,
    is_timed: bool = True,
) -> None:
    """Raises a ValueError where these options are wrong whatever the devices are."""
    is_function = callable(split) and not isinstance(split, type)
    if not is_function and not (isinstance(split, str) and split in SPLITS):
        raise ValueError(
            f"split: expected one of {sorted(SPLITS)} or a function (batch_size, devices) -> "
            f"sizes, got {short_repr(split)}. Use 'even', or weights=[...] for fixed shares."
        )
    if split == "auto" and not is_timed:
        raise ValueError(
            "split: expected another one than 'auto' outside of Lightning, where nothing says when "
            "a step ends, got 'auto'. Use 'adaptive', or DataParallelStrategy."
        )
    if sample_cost is not None and (split != "cost" or not isinstance(sample_cost, str)):
        raise ValueError(
            "sample_cost: expected None, or with split='cost' the name of an entry of the batch, "
            f"got {short_repr(sample_cost)} with split={short_repr(split)}. Use split='cost' and a "
            "key or dotted path such as 'lengths', or leave it out."
        )
    if weights is None:
        return
    if split not in ("even", "adaptive"):
        raise ValueError(
            f"weights: expected None with split={short_repr(split)}, got {short_repr(weights)}. "
            "Leave out one of the two: weights are a split of their own, or what split='adaptive' "
            "begins with."
        )
    is_list = isinstance(weights, Sequence) and not isinstance(weights, str | bytes)
    if not is_list or not all(map(_is_weight, weights)) or not any(weights):
        raise ValueError(
            f"weights: expected a list of finite numbers of at least 0, not all 0, got "
            f"{short_repr(weights)}. Give each device its share, such as [1, 3, 3, 3]."
        )
    if split == "adaptive" and not all(weights):
        raise ValueError(
            "weights: expected numbers above 0 with split='adaptive', got "
            f"{short_repr(weights)}. It tries every device; leave devices out, or use split='even'."
        )


def split_policy(
    split: str | OwnSplit,
    weights: Sequence[float] | None,
    devices: Sequence[Any],
    capacities: Capacities | None = None,
) -> SplitPolicy:
    """The function that splits every batch over the devices.

    Args:
        split: the option, see `DataParallelStrategy`.
        weights: the option.
        devices: a user's function gets them; else only which of them are equal matters.
        capacities: returns the bytes that this process can have on each device. `"memory"` needs
            it; `"auto"` asks it before it gives a device more samples than that had before.

    Example:
        >>> split_policy("even", [1, 2, 3], ["cpu"] * 3)(12)
        (2, 4, 6)
        >>> split_policy(lambda n, devices: (n - 1, 1), None, ["cpu"] * 2)(12)
        (11, 1)
    """
    check_split(split, weights)
    k, places = len(devices), [list(devices).index(device) for device in devices]
    if weights is not None and len(weights) != k:
        raise ValueError(
            f"weights: expected {k} numbers, one per device, got {len(weights)}: {list(weights)}. "
            "Give every device a weight (0 leaves it idle)."
        )
    if callable(split):
        return partial(_checked, split, list(devices))
    if split == "memory":
        if capacities is None:
            raise ValueError("split='memory': expected the bytes that each device has, got None.")
        capacities()  # raises an error now where devices do not count their memory
        return Memory(places, capacities)
    if split == "auto":
        return Auto(places, capacities)
    if split == "cost":
        return CostSplit(k)
    shares = None if weights is None else tuple(map(plain_weight, weights))
    if split == "adaptive":
        return Adaptive(k, shares)
    if shares is not None:
        return partial(_weighted, weights=shares)
    return partial(chunk if split == "chunk" else even, k=k)


def is_fixed(policy: SplitPolicy) -> bool:
    """Whether sizes follow from the batch size alone."""
    return isinstance(policy, partial) and policy.func in (even, chunk, _weighted)


@lru_cache(maxsize=256)
def _weighted(n: int, weights: tuple[float, ...]) -> Sizes:
    return weighted(n, weights)


def _checked(split: OwnSplit, devices: Sequence[Any], n: int) -> Sizes:
    """The answer of a user's function."""
    sizes, k = split(n, list(devices)), len(devices)
    are_sizes = isinstance(sizes, Sequence) and all(map(_is_size, sizes))
    if not are_sizes or len(sizes) != k or sum(sizes) != n:
        raise ValueError(
            f"split: expected {k} integers of at least 0, one per device, with sum {n}, from "
            f"{getattr(split, '__qualname__', split)}({n}, devices), got {sizes!r}. Return a size "
            "for every device; 0 leaves it idle."
        )
    return tuple(int(size) for size in sizes)


def _is_size(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= 0


def plain_weight(weight: Any) -> float:
    """A weight as a number that `Fraction` takes, which those of NumPy are not."""
    return int(weight) if isinstance(weight, Integral) else float(weight)


def _is_weight(value: Any) -> bool:
    is_number = not isinstance(value, bool) and isinstance(value, Real)
    return bool(is_number and 0 <= value < math.inf)
