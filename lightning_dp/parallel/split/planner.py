"""The planner: which samples of a batch go where, by the policy and within what fits.

What fits on each device is learnt from the steps that ran out of memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from lightning_dp.parallel.split.arithmetic import (
    Caps,
    Order,
    Sizes,
    SplitPolicy,
    by_cost,
    fitted,
    has_room,
)
from lightning_dp.parallel.split.policies import CostSplit, is_fixed
from lightning_dp.parallel.split.usage import LearningSplit, StepUsage

MARGIN = 8
"""A device that ran out of memory with n samples gets n / 8 less the next time."""

Least: TypeAlias = Callable[[], int]
"""Returns the fewest samples that a replica can work with."""


@dataclass(frozen=True)
class Plan:
    """Which samples go where."""

    sizes: Sizes
    order: Order | None = None  # None for the batch's own order
    loads: tuple[float, ...] = field(default=(), repr=False)  # summed costs, in a split by cost
    left_out: int = 0  # samples that no device gets
    whole: bool = False  # nothing can be cut: the root gets the batch as it is
    reading: Any = "columns"  # how the batch was read, for `cut`


class Capacity:
    """What fits on the devices, as far as steps have shown.

    Example:
        >>> capacity = Capacity(2)
        >>> capacity.record_oom((32, 32), [1])
        >>> capacity.caps
        [None, 28]
    """

    def __init__(self, k: int) -> None:
        self.fits: Sizes = (0,) * k  # the most samples that each device has taken
        self._fails: list[int | None] = [None] * k  # the fewest with which it ran out
        self.max_loads = [math.inf] * k  # in a split by cost
        self._latest: Sizes = ()  # of the latest step, if it was done

    @property
    def caps(self) -> Caps | None:
        """Of each device the most samples to give it, None for no limit; None if all have none."""
        if not any(self._fails):
            return None
        return [
            None if fails is None else max(fits, fails - max(1, fails // MARGIN))
            for fits, fails in zip(self.fits, self._fails, strict=True)
        ]

    def record_success(self, sizes: Sizes) -> None:
        """A step with these sizes was done."""
        if sizes != self._latest:
            self.fits, self._latest = tuple(map(max, self.fits, sizes)), sizes

    def record_oom(self, sizes: Sizes, devices: Sequence[int]) -> None:
        """In a step with these sizes, these devices ran out of memory.

        The heaviest batch is to fit, so that as many samples of another one have fitted does not
        count any more.
        """
        self._latest, fits = (), list(self.fits)
        for k in devices:
            self._fails[k] = min(sizes[k], self._fails[k] or sizes[k])
            fits[k] = min(fits[k], sizes[k] - 1)
        self.fits = tuple(fits)

    def has_room(self, n: int, least: int = 1) -> bool:
        """Whether the caps leave room for n samples, each device with at least `least` or none."""
        return has_room(n, self.caps or [None], least)

    def most(self, n: int, least: int = 1) -> int:
        """The largest batch of at most n samples that is known to fit."""
        return next(m for m in range(n, -1, -1) if has_room(m, self.fits, least))

    def trial(self, n: int, least: int = 1) -> Sizes | None:
        """Sizes, of n samples at most, that show most about what fits; None if all is known.

        Halves for each device the range between what fits and what does not; at last, all that
        has fitted on some device is tried at once.
        """
        sizes, left = [], n
        for fits, fails in zip(self.fits, self._fails, strict=True):
            low = max(fits, least - 1)
            size = fits if fails is None or fails - low <= 1 else (low + fails) // 2
            sizes.append(min(left, size) if min(left, size) >= least else 0)
            left -= sizes[-1]
        is_news = any(map(int.__gt__, sizes, self.fits)) or self._latest != tuple(sizes)
        return tuple(sizes) if is_news and any(sizes) else None


class Planner:
    """Decides for every batch, once, which samples each device gets."""

    def __init__(self, k: int, policy: SplitPolicy) -> None:
        self.policy = policy
        self.latest = Plan((0,) * k)
        self.repeated: Hashable = None  # the kind of batch for which `latest` may be used again
        # Tested once: isinstance with a protocol takes as long as cutting a batch.
        self._learner = policy if isinstance(policy, LearningSplit) else None
        self.learns = self._learner is not None
        self._is_fixed = is_fixed(policy)
        # By `training`: evaluation keeps no graphs, so more fits.
        self._capacity = {training: Capacity(k) for training in (True, False)}
        self._learnt: StepUsage | None = None
        self._least: Least = lambda: 1

    def plan(
        self,
        n: int,
        costs: Callable[[], Sequence[float]],
        *,
        training: bool,
        reading: Any = "columns",
        least: Least = lambda: 1,
        kind: Hashable = None,
    ) -> Plan:
        """Decides for a batch of n samples.

        Args:
            n: the batch size, in samples.
            costs: returns what each sample costs; called if the split is by cost.
            training: whether the step keeps a graph.
            reading: how the batch was read; it becomes the plan's.
            least: returns the fewest samples that a replica can work with; called if a device
                would have one sample.
            kind: equal for batches that a fixed policy splits alike.
        """
        self._least = least
        plan = None
        if isinstance(self.policy, CostSplit):
            plan = self._by_cost(costs(), self._capacity[training].max_loads)
        plan = plan or Plan(self._sizes(n, training))
        self._set(replace(plan, reading=reading))
        can_repeat = self._is_fixed and self._capacity[training].caps is None
        if can_repeat and not _has_single(self.policy(n)):
            self.repeated = kind
        return self.latest

    def trial(self, n: int, *, training: bool) -> Plan | None:
        """A part of a batch of n samples that shows more about what fits; None if all is known."""
        sizes = self._capacity[training].trial(n, self._least())
        if sizes is None:
            return None
        self._set(Plan(sizes, left_out=n - sum(sizes), reading=self.latest.reading))
        return self.latest

    def whole(self) -> Plan:
        """For a batch in which nothing can be cut, and which shows nothing about what fits."""
        k = len(self.latest.sizes)
        self._set(Plan((0,) * k))
        return Plan((1, *[0] * (k - 1)), whole=True)

    def learn(self, step: StepUsage | None) -> None:
        """Shows a training step, once, to a policy that learns."""
        if self._learner is not None and step is not None and step is not self._learnt:
            self._learner.learn(step)
            self._learnt = step

    def record_success(self, *, training: bool) -> None:
        """The latest plan's step was done."""
        self._capacity[training].record_success(self.latest.sizes)

    def record_oom(self, devices: Sequence[int], *, training: bool) -> None:
        """In the latest plan's step these devices ran out of memory: they get less from now on."""
        self.repeated, capacity = None, self._capacity[training]
        if not self.latest.loads:
            capacity.record_oom(self.latest.sizes, devices)
            return
        for k in devices:
            capacity.max_loads[k] = self.latest.loads[k] * (1 - 1 / MARGIN)

    def has_room(self, n: int, *, training: bool) -> bool:
        """Whether there may be a split of n samples that fits."""
        return self._capacity[training].has_room(n, self._least())

    def fits(self, *, training: bool) -> Sizes:
        """The most samples that each device is known to take."""
        return self._capacity[training].fits

    def most(self, n: int, *, training: bool) -> int:
        """The largest batch of at most n samples that is known to fit."""
        return self._capacity[training].most(n, self._least())

    def _set(self, plan: Plan) -> None:
        self.repeated, self.latest = None, plan

    def _sizes(self, n: int, training: bool) -> Sizes:
        capacity = self._capacity[training]
        caps = capacity.caps if capacity.has_room(n) else None
        wanted = self.policy(n) if self._learner is None else self._learner(n, caps)
        least = self._least() if _has_single(wanted) or caps is not None else 1
        # Without room within the caps, memory may have room now; if not, its error is clear.
        return fitted(wanted, caps, least) or fitted(wanted, None, least) or wanted

    def _by_cost(self, costs: Sequence[float], max_loads: Sequence[float]) -> Plan | None:
        """None if the largest loads leave no room for a split by cost."""
        caps = max_loads if min(max_loads) < math.inf else None
        order: Order = by_cost(costs, len(max_loads), caps)
        sizes = tuple(map(len, order))
        if sum(sizes) < len(costs):
            return None
        if _has_single(sizes):
            sizes = fitted(sizes, None, self._least()) or sizes
            order = _moved(order, sizes, costs)
        loads = tuple(math.fsum(costs[i] for i in part) for part in order)
        fits = not caps or all(map(float.__le__, loads, caps))
        return Plan(sizes, order, loads) if fits else None


def _has_single(sizes: Sizes) -> bool:
    """Whether a device has one sample, and not because the batch has no more."""
    return 1 in sizes and sum(sizes) > 1


def _moved(order: Order, sizes: Sizes, costs: Sequence[float]) -> Order:
    """The same samples in shards of other sizes: where there are too many, the cheapest go."""
    parts = [sorted(part, key=costs.__getitem__, reverse=True) for part in order]
    spare = [i for part, size in zip(parts, sizes, strict=True) for i in part[size:]]
    kept = [part[:size] for part, size in zip(parts, sizes, strict=True)]
    return [
        sorted([*part, *(spare.pop() for _ in range(size - len(part)))])
        for part, size in zip(kept, sizes, strict=True)
    ]
