"""The options `split`, `weights` and `sample_cost`, checked, and the policy that they ask for."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from numbers import Integral, Real
from typing import Any, TypeAlias

from lightning_dp.parallel.checks import told
from lightning_dp.parallel.split.adaptive import Adaptive
from lightning_dp.parallel.split.arithmetic import Sizes, SplitPolicy, chunk, even, weighted
from lightning_dp.parallel.split.auto import Auto
from lightning_dp.parallel.split.memory import Capacities, Memory

OwnSplit: TypeAlias = Callable[[int, Sequence[Any]], Sequence[int]]
"""`(batch_size, devices) -> sizes`, one size per device."""

_FIXED: dict[str, Callable[[int, int], Sizes]] = {"even": even, "chunk": chunk}
SPLITS = (*_FIXED, "auto", "memory", "adaptive", "cost")


class CostSplit:
    """The policy of split="cost", which the planner asks for an order; without costs it is even."""

    def __init__(self, k: int) -> None:
        self._k = k

    def __call__(self, n: int) -> Sizes:
        """The sizes for n samples of equal cost."""
        return even(n, self._k)


def check_split(
    split: str | OwnSplit,
    weights: Sequence[float] | None,
    sample_cost: str | None = None,
    *,
    is_timed: bool = True,
) -> None:
    """Raises a ValueError where these options are wrong whatever the devices are."""
    if not (_is_function(split) or (isinstance(split, str) and split in SPLITS)):
        raise ValueError(
            f"split: expected one of {sorted(SPLITS)} or a function (batch_size, devices) -> "
            f"sizes, got {told(split)}. Use 'even', or weights=[...] for fixed shares."
        )
    if split == "auto" and not is_timed:
        raise ValueError(
            "split: expected another one than 'auto' outside of Lightning, where nothing says when "
            "a step ends, got 'auto'. Use 'adaptive', or DataParallelStrategy."
        )
    if sample_cost is not None and not (isinstance(sample_cost, str) and sample_cost):
        raise ValueError(
            f"sample_cost: expected the name of an entry of the batch, got {told(sample_cost)}. "
            "Write a key or dotted path, such as 'lengths', or leave it out to ask the module."
        )
    if sample_cost is not None and split != "cost":
        raise ValueError(
            f"sample_cost: expected None with split={told(split)}, got {sample_cost!r}. "
            "Use split='cost', or leave it out."
        )
    if weights is None:
        return
    if split not in ("even", "adaptive"):
        raise ValueError(
            f"weights: expected None with split={told(split)}, got {told(weights)}. Leave out one "
            "of the two: weights are a split of their own, or what split='adaptive' begins with."
        )
    is_list = isinstance(weights, Sequence) and not isinstance(weights, str | bytes)
    if not is_list or not all(map(_is_weight, weights)) or not any(weights):
        raise ValueError(
            f"weights: expected a list of finite numbers of at least 0, not all 0, got "
            f"{told(weights)}. Give each device its share, such as [1, 3, 3, 3]."
        )
    if split == "adaptive" and not all(weights):
        raise ValueError(
            f"weights: expected numbers above 0 with split='adaptive', got {told(weights)}. It "
            "tries every device; leave devices out, or use split='even'."
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
    if callable(split):
        return partial(_checked, split, list(devices))
    if split == "cost":
        return CostSplit(k)
    if split == "auto":
        return Auto(places, capacities)
    if split == "memory":
        if capacities is None:
            raise ValueError(
                "split='memory': expected capacities, the bytes that each device has, got None. "
                "Give a function that returns them."
            )
        capacities()  # raises an error now where devices do not count their memory
        return Memory(places, capacities)
    shares = None if weights is None else tuple(plain_weight(w) for w in weights)
    if shares is not None and len(shares) != k:
        raise ValueError(
            f"weights: expected {k} numbers, one per device, got {len(shares)}: {list(shares)}. "
            "Give every device a weight (0 leaves it idle)."
        )
    if split == "adaptive":
        return Adaptive(k, shares)
    return partial(_fixed_sizes, split, k) if shares is None else partial(_weighted_sizes, shares)


@lru_cache(maxsize=256)
def _fixed_sizes(split: str, k: int, n: int) -> Sizes:
    return _FIXED[split](n, k)


@lru_cache(maxsize=256)
def _weighted_sizes(shares: tuple[float, ...], n: int) -> Sizes:
    return weighted(n, shares)


def is_fixed(policy: SplitPolicy) -> bool:
    """Whether sizes follow from the batch size alone."""
    return isinstance(policy, partial) and policy.func in (_fixed_sizes, _weighted_sizes)


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


def _is_function(split: object) -> bool:
    """Whether it can be called with a batch size and devices; a class makes no sizes."""
    if not callable(split) or isinstance(split, type):
        return False
    try:
        inspect.signature(split).bind(1, [])
    except TypeError:
        return False
    except ValueError:  # a function in C, which has no signature
        return True
    return True


def _is_size(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= 0


def plain_weight(weight: Any) -> float:
    """A weight as a number that `Fraction` takes, which those of NumPy are not."""
    return int(weight) if isinstance(weight, Integral) else float(weight)


def _is_weight(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        return math.isfinite(value) and float(value) >= 0
    except OverflowError:  # an integer that is too large for a float
        return False
