"""The plan of a batch: the fixed policies, the options that name a policy, and the planner."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from numbers import Integral, Real
from typing import Any, TypeAlias

from torch import Tensor

from lightning_dp.parallel.checks import expected, is_choice, short_repr
from lightning_dp.parallel.split.learning import Adaptive, Auto, Capacities, Memory
from lightning_dp.parallel.split.optimal import Sizes, by_cost, fitted

SplitPolicy: TypeAlias = Callable[[Any], Sizes]
"""Batch size in, or the samples' costs for split="cost"; sizes out.

A policy that learns also has a method `learn(step_usage)`.
"""

OwnSplit: TypeAlias = Callable[[int, Sequence[Any]], Sequence[int]]
"""A user's function `(batch_size, devices) -> sizes`, one size per device."""

SPLITS = ("even", "chunk", "auto", "memory", "adaptive", "cost")

# --- Fixed policies


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
    exact = [Fraction(float(weight)) for weight in weights]
    quotas = [n * weight / sum(exact) for weight in exact]
    sizes = list(map(math.floor, quotas))
    by_remainder = sorted(range(len(sizes)), key=lambda i: (sizes[i] - quotas[i], i))
    for i in by_remainder[: n - sum(sizes)]:
        sizes[i] += 1
    return tuple(sizes)


def is_fixed(policy: SplitPolicy) -> bool:
    """Whether sizes follow from the batch size alone."""
    return isinstance(policy, partial) and policy.func in (even, chunk, weighted)


# --- Options


def check_split(
    split: str | OwnSplit,
    weights: Sequence[float] | None,
    sample_cost: str | None = None,
    *,
    is_timed: bool = True,
) -> None:
    """Raises a ValueError where these options are wrong whatever the devices are."""
    is_function = callable(split) and not isinstance(split, type)
    if not is_function and not is_choice(split, SPLITS):
        wanted = f"one of {sorted(SPLITS)} or a function (batch_size, devices) -> sizes"
        raise expected("split", wanted, split, "Use 'even', or weights=[...] for fixed shares.")
    if split == "auto" and not is_timed:
        wanted = "another one than 'auto' outside of Lightning, where nothing says when a step ends"
        raise expected("split", wanted, split, "Use 'adaptive', or DataParallelStrategy.")
    if sample_cost is not None and (split != "cost" or not isinstance(sample_cost, str)):
        wanted = "with split='cost' the name of an entry of the batch, else None"
        hint = "Give a key or dotted path such as 'lengths', or leave it out."
        raise expected("sample_cost", wanted, sample_cost, hint)
    if weights is None:
        return
    if split not in ("even", "adaptive"):
        hint = "Leave out one of the two: weights are a split of their own."
        raise expected("weights", f"None with split={short_repr(split)}", weights, hint)
    is_list = isinstance(weights, Sequence) and not isinstance(weights, str | bytes)
    if not is_list or not all(map(_is_weight, weights)) or not any(weights):
        wanted = "a list of finite numbers of at least 0, not all 0"
        raise expected("weights", wanted, weights, "Give each device its share, as [1, 3, 3, 3].")
    if split == "adaptive" and not all(weights):
        hint = "It tries every device; leave devices out, or use split='even'."
        raise expected("weights", "numbers above 0 with split='adaptive'", weights, hint)


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
            it; `"auto"` asks it before it gives the root more samples than that had before.

    Example:
        >>> split_policy("even", [1, 2, 3], ["cpu"] * 3)(12)
        (2, 4, 6)
        >>> split_policy(lambda n, devices: (n - 1, 1), None, ["cpu"] * 2)(12)
        (11, 1)
    """
    check_split(split, weights)
    k = len(devices)
    if weights is not None and len(weights) != k:
        raise ValueError(
            f"weights: expected {k} numbers, one per device, got {len(weights)}: {list(weights)}. "
            "Give every device a weight (0 leaves it idle)."
        )
    if callable(split):
        return partial(_checked, split, list(devices))
    if split == "memory":
        assert capacities is not None
        capacities()  # raises an error now where devices do not count their memory
        return Memory(k, capacities, is_shared=len(set(devices)) < k)
    if split == "auto":
        return Auto(k, capacities)
    if split == "adaptive":
        return Adaptive(k, weights)
    if split == "cost":
        return partial(by_cost, k=k)
    if weights is not None:
        return partial(weighted, weights=weights)
    return partial(chunk if split == "chunk" else even, k=k)


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
    return tuple(map(int, sizes))


def _is_size(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= 0


def _is_weight(value: Any) -> bool:
    is_number = not isinstance(value, bool) and isinstance(value, Real)
    return is_number and 0 <= float(value) < math.inf


# --- The planner


@dataclass(frozen=True)
class Plan:
    """How a batch is cut: into consecutive shards of these sizes."""

    sizes: Sizes
    whole: bool = False  # nothing can be cut: the root gets the batch as it is
    reading: Any = "columns"  # how the batch was read, for `cut`


class Planner:
    """Decides for every batch, once, how many samples each device gets.

    A device that ran out of memory gets at most as many samples as did not fit, less an eighth,
    from then on. Evaluation keeps no graphs, so it has caps of its own.

    Example:
        >>> planner = Planner(2, split_policy("even", None, ["cpu"] * 2))
        >>> planner.plan(8, list, training=True).sizes
        (4, 4)
        >>> planner.record_oom([0], training=True)
        True
        >>> planner.plan(8, list, training=True).sizes
        (3, 5)
    """

    def __init__(self, k: int, policy: SplitPolicy) -> None:
        self.policy = policy
        self.latest = Plan((0,) * k)
        self._is_by_cost = getattr(policy, "func", None) is by_cost
        self._caps: dict[bool, list[int | None]] = {t: [None] * k for t in (True, False)}
        self._least: Callable[[], int] = lambda: 1  # of the latest batch

    def plan(
        self,
        n: int,
        costs: Callable[[], Sequence[float] | Tensor],
        *,
        training: bool,
        reading: Any = "columns",
        least: Callable[[], int] = lambda: 1,
    ) -> Plan:
        """Decides for a batch of n samples.

        Args:
            n: the batch size, in samples.
            costs: returns what each sample costs; called if the split is by cost.
            training: whether the step keeps a graph.
            reading: how the batch was read; it becomes the plan's.
            least: returns the fewest samples that a replica can work with; called if a device
                would have one of several samples, or caps are known.
        """
        caps, self._least = self._caps[training], least
        sizes = self.policy(costs() if self._is_by_cost else n)
        if caps.count(None) < len(caps) or (1 in sizes and n > 1):
            # If the caps have no room, the step is tried without them: memory may be free by now.
            fewest = least()
            sizes = fitted(sizes, caps, fewest) or fitted(sizes, None, fewest) or sizes
        self.latest = Plan(sizes, reading=reading)
        return self.latest

    def whole(self) -> Plan:
        """The plan of a batch in which nothing can be cut; what fits cannot be learnt from it."""
        k = len(self.latest.sizes)
        self.latest = Plan((0,) * k)
        return Plan((1, *[0] * (k - 1)), whole=True)

    def record_oom(self, devices: Sequence[int], *, training: bool) -> bool:
        """Caps devices that ran out of memory in the latest plan's step, below what did not fit.

        Returns whether there is a split of that batch within the caps.
        """
        sizes, caps = self.latest.sizes, self._caps[training]
        for k in devices:
            caps[k] = sizes[k] - max(1, sizes[k] // 8)
        return fitted(even(sum(sizes), len(caps)), caps, self._least()) is not None
