"""The planner: which samples of a batch go where, by the policy and within what fits.

What fits on each device is known from the steps that ran out of memory.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from numbers import Integral, Real
from typing import Any, TypeAlias

from torch import Tensor

from lightning_dp.parallel.checks import short_repr
from lightning_dp.parallel.split.arithmetic import (
    Caps,
    Order,
    Sizes,
    SplitPolicy,
    by_cost,
    chunk,
    even,
    fitted,
    weighted,
)
from lightning_dp.parallel.split.auto import Auto
from lightning_dp.parallel.split.learning import (
    Adaptive,
    Capacities,
    LearningSplit,
    Memory,
    StepUsage,
)

MARGIN = 8
"""A device that ran out of memory with n samples gets n / 8 less the next time."""

OwnSplit: TypeAlias = Callable[[int, Sequence[Any]], Sequence[int]]
"""`(batch_size, devices) -> sizes`, one size per device."""

Least: TypeAlias = Callable[[], int]
"""Returns the fewest samples that a replica can work with."""

SPLITS = ("even", "chunk", "auto", "memory", "adaptive", "cost")


@lru_cache(maxsize=256)
def _weighted(n: int, weights: tuple[float, ...]) -> Sizes:
    return weighted(n, weights)


@dataclass(frozen=True)
class Plan:
    """Which samples go where."""

    sizes: Sizes
    order: Order | None = None  # None for the batch's own order
    loads: tuple[float, ...] = field(default=(), repr=False)  # summed costs, in a split by cost
    whole: bool = False  # nothing can be cut: the root gets the batch as it is
    reading: Any = "columns"  # how the batch was read, for `cut`


class Planner:
    """Decides for every batch, once, which samples each device gets.

    Example:
        >>> planner = Planner(2, split_policy("even", None, ["cpu"] * 2))
        >>> planner.plan(8, list, training=True).sizes
        (4, 4)
        >>> planner.record_oom([0], training=True)
        >>> planner.plan(8, list, training=True).sizes
        (3, 5)
    """

    def __init__(self, k: int, policy: SplitPolicy) -> None:
        self.policy = policy
        self.latest = Plan((0,) * k)
        self._learner = policy if isinstance(policy, LearningSplit) else None
        self.learns = self._learner is not None
        # By `training`: evaluation keeps no graphs, so more fits.
        self._capacity = {training: Capacity(k) for training in (True, False)}
        self._learnt: StepUsage | None = None
        self._least: Least = lambda: 1

    def plan(
        self,
        n: int,
        costs: Callable[[], Sequence[float] | Tensor],
        *,
        training: bool,
        reading: Any = "columns",
        least: Least = lambda: 1,
    ) -> Plan:
        """Decides for a batch of n samples.

        Args:
            n: the batch size, in samples.
            costs: returns what each sample costs; called if the split is by cost.
            training: whether the step keeps a graph.
            reading: how the batch was read; it becomes the plan's.
            least: returns the fewest samples that a replica can work with; called if a device
                would have one sample, or caps are known.
        """
        self._least = least
        plan = None
        if isinstance(self.policy, CostSplit):
            plan = self._by_cost(costs(), self._capacity[training].max_loads)
        plan = plan or Plan(self._sizes(n, self._capacity[training]))
        self.latest = replace(plan, reading=reading)
        return self.latest

    def whole(self) -> Plan:
        """For a batch in which nothing can be cut, and which shows nothing about what fits."""
        k = len(self.latest.sizes)
        self.latest = Plan((0,) * k)
        return Plan((1, *[0] * (k - 1)), whole=True)

    def learn(self, step: StepUsage | None) -> None:
        """Shows a training step, once, to a policy that learns."""
        if self._learner is not None and step is not None and step is not self._learnt:
            self._learner.learn(step)
            self._learnt = step

    def record_oom(self, devices: Sequence[int], *, training: bool) -> None:
        """In the latest plan's step these devices ran out of memory: they get less from now on."""
        capacity = self._capacity[training]
        if not self.latest.loads:
            capacity.record_oom(self.latest.sizes, devices)
            return
        for k in devices:
            capacity.max_loads[k] = self.latest.loads[k] * (1 - 1 / MARGIN)

    def has_room(self, n: int, *, training: bool) -> bool:
        """Whether there may be a split of n samples that fits."""
        capacity = self._capacity[training]
        return not any(capacity.fails) or capacity.caps(n, self._least()) is not None

    def _sizes(self, n: int, capacity: Capacity) -> Sizes:
        least = self._least() if any(capacity.fails) else 1
        # None without room within the caps: memory may have room now; if not, its error is clear.
        caps = capacity.caps(n, least)
        wanted = self.policy(n) if self._learner is None else self._learner(n, caps)
        if _has_single(wanted):
            least = self._least()
        return fitted(wanted, caps, least) or fitted(wanted, None, least) or wanted

    def _by_cost(self, costs: Sequence[float] | Tensor, max_loads: Sequence[float]) -> Plan | None:
        """None where it is split by number: loads do not fit, or a replica needs two samples."""
        caps = max_loads if min(max_loads) < math.inf else None
        shares = by_cost(costs, len(max_loads), caps)
        if shares is None:
            return None
        sizes = tuple(map(len, shares.parts))
        if _has_single(sizes) and self._least() > 1:
            return None
        is_sliced = all(isinstance(part, range) for part in shares.parts)
        return Plan(sizes, None if is_sliced else shares.parts, shares.loads)


class Capacity:
    """What does not fit on the devices, as far as steps have shown.

    Example:
        >>> capacity = Capacity(2)
        >>> capacity.record_oom((32, 32), [1])
        >>> capacity.caps(64)
        [None, 28]
    """

    def __init__(self, k: int) -> None:
        self.fails: list[int | None] = [None] * k  # the fewest samples with which it ran out
        self.max_loads = [math.inf] * k  # in a split by cost

    def record_oom(self, sizes: Sizes, devices: Sequence[int]) -> None:
        """In a step with these sizes, these devices ran out of memory."""
        for k in devices:
            self.fails[k] = min(sizes[k], self.fails[k] or sizes[k])

    def caps(self, n: int, least: int = 1) -> Caps | None:
        """Of each device the most samples to give it; None if all have no limit, or none has room.

        The margin below what did not fit is an eighth, or less if n samples need the room.
        """
        margin, most = MARGIN, max((fails or 0 for fails in self.fails), default=0)
        while most:
            caps = [f if f is None else f - max(1, f // margin) for f in self.fails]
            if fitted(even(n, len(caps)), caps, least):
                return caps
            if margin > most:  # each cap is one below what failed
                break
            margin *= 2
        return None


def _has_single(sizes: Sizes) -> bool:
    """Whether a device has one sample, and not because the batch has no more."""
    return 1 in sizes and sum(sizes) > 1


# The options `split`, `weights` and `sample_cost`


class CostSplit:
    """The policy of split="cost"; where the planner cannot split by cost it is even."""

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
            f"sizes, got {short_repr(split)}. Use 'even', or weights=[...] for fixed shares."
        )
    if split == "auto" and not is_timed:
        raise ValueError(
            "split: expected another one than 'auto' outside of Lightning, where nothing says when "
            "a step ends, got 'auto'. Use 'adaptive', or DataParallelStrategy."
        )
    if sample_cost is not None and not (isinstance(sample_cost, str) and sample_cost):
        raise ValueError(
            "sample_cost: expected the name of an entry of the batch, got "
            f"{short_repr(sample_cost)}. "
            "Write a key or dotted path, such as 'lengths', or leave it out to ask the module."
        )
    if sample_cost is not None and split != "cost":
        raise ValueError(
            f"sample_cost: expected None with split={short_repr(split)}, got {sample_cost!r}. "
            "Use split='cost', or leave it out."
        )
    if weights is None:
        return
    if split not in ("even", "adaptive"):
        raise ValueError(
            f"weights: expected None with split={short_repr(split)}, got {short_repr(weights)}. "
            "Leave out one "
            "of the two: weights are a split of their own, or what split='adaptive' begins with."
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
            f"{short_repr(weights)}. It "
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
    shares = None if weights is None else tuple(map(plain_weight, weights))
    if shares is not None and len(shares) != k:
        raise ValueError(
            f"weights: expected {k} numbers, one per device, got {len(shares)}: {list(shares)}. "
            "Give every device a weight (0 leaves it idle)."
        )
    if split == "adaptive":
        return Adaptive(k, shares)
    if shares is not None:
        return partial(_weighted, weights=shares)
    return partial(chunk if split == "chunk" else even, k=k)


def is_fixed(policy: SplitPolicy) -> bool:
    """Whether sizes follow from the batch size alone."""
    return isinstance(policy, partial) and policy.func in (even, chunk, _weighted)


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
