"""The planner: which samples of a batch go where. As the policy says, within what fits.

What fits on each device is learnt from the steps that did not.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from lightning_dp.parallel.split.arithmetic import (
    CostSplit,
    Order,
    Sizes,
    SplitPolicy,
    minimax,
    reordered,
    unequal,
)
from lightning_dp.parallel.split.least import at_least, has_room
from lightning_dp.parallel.split.policies import is_fixed
from lightning_dp.parallel.split.usage import Caps, LearningSplit, StepUsage

MARGIN = 8
"""A device that failed with n samples gets n / 8 less the next time."""

Least: TypeAlias = Callable[[], int]
"""Returns the fewest samples that a replica can work with."""


@dataclass(frozen=True)
class Plan:
    """Which samples go where."""

    sizes: Sizes
    order: Order | None = None  # None for the batch's own order
    loads: tuple[float, ...] = field(default=(), repr=False)  # costs, where they are split by cost
    left_out: int = 0  # samples that no device gets
    whole: bool = False  # there is nothing to cut: the root gets the batch as it is
    reading: Any = "columns"  # how the batch was read, for those who cut it


class Capacity:
    """What fits on the devices, as far as steps have shown.

    Example:
        >>> capacity = Capacity(2)
        >>> capacity.record_oom((32, 32), [1])
        >>> capacity.within((32, 32)), capacity.within((1, 2))
        ((36, 28), (1, 2))
    """

    def __init__(self, k: int) -> None:
        self._fits = [0] * k
        self._fails: list[int | None] = [None] * k
        self._latest: Sizes = ()

    @property
    def caps(self) -> Caps | None:
        """Of each device the most samples to give it, None for no limit; None if all have none."""
        if not any(self._fails):
            return None
        return [
            None if fails is None else max(fits, fails - max(1, fails // MARGIN))
            for fits, fails in zip(self._fits, self._fails, strict=True)
        ]

    @property
    def fits(self) -> Sizes:
        """The most samples that each device is known to take."""
        return tuple(self._fits)

    def record_success(self, sizes: Sequence[int]) -> None:
        """A step with these sizes was done."""
        self._fits = list(map(max, self._fits, sizes))
        self._latest = tuple(sizes)

    def record_oom(self, sizes: Sequence[int], devices: Sequence[int]) -> None:
        """In a step with these sizes, these devices ran out of memory.

        Batches differ, and the heaviest is to fit: that so many fitted earlier counts no more.
        """
        self._latest = ()
        for k in devices:
            self._fails[k] = min(sizes[k], self._fails[k] or sizes[k])
            self._fits[k] = min(self._fits[k], sizes[k] - 1)

    def has_room(self, n: int, least: int = 1) -> bool:
        """Whether the caps leave room for n samples, at least so many on each device or none."""
        return has_room(n, self.caps or [None], least)

    def most(self, n: int, least: int = 1) -> int:
        """The largest batch of at most n samples that is known to fit."""
        return next(m for m in range(n, -1, -1) if has_room(m, self._fits, least))

    def within(self, wanted: Sizes) -> Sizes:
        """Sizes as wanted, but none above its cap; the others share what is left over.

        They do in proportion to what they were to have; who was to have nothing comes last. Where
        the caps leave no room, sizes stay as wanted: memory has room now, or its error is clear.
        """
        caps = self.caps
        if caps is None or all(c is None or n <= c for n, c in zip(wanted, caps, strict=True)):
            return wanted
        if not self.has_room(sum(wanted)):
            return wanted
        per_sample = [1 / n if n else float("inf") for n in wanted]
        return minimax(sum(wanted), [0.0] * len(wanted), per_sample, caps)

    def trial(self, n: int, least: int = 1) -> Sizes | None:
        """Sizes, of n samples at most, that tell most about what fits; None if all is known.

        Halves for each device the range between what fits and what does not; at last, all that
        has fitted on some device is tried at once. The sum may be less than n. A device gets at
        least so many samples, or none.
        """
        sizes, left = [], n
        for fits, fails in zip(self._fits, self._fails, strict=True):
            low = max(fits, least - 1)
            known = fails is None or fails - low <= 1
            size = min(left, fits if known or fails is None else (low + fails) // 2)
            sizes.append(size if size >= least else 0)
            left -= sizes[-1]
        is_news = any(map(int.__gt__, sizes, self._fits)) or self._latest != tuple(sizes)
        return tuple(sizes) if is_news and any(sizes) else None


class Planner:
    """Decides for every batch, once, which samples each device gets.

    The policy decides as long as everything fits.
    """

    def __init__(self, k: int, policy: SplitPolicy) -> None:
        self.latest = Plan((0,) * k)
        self._policy = policy
        self._is_fixed = is_fixed(policy)
        self.repeated: Hashable = None  # of which kind a batch is that is planned as the latest one
        self.is_recorded = False  # the latest plan's step was done
        # Asked once: to see whether something follows a protocol takes as long as to cut a batch.
        self._learner = policy if isinstance(policy, LearningSplit) else None
        self.learns = self._learner is not None  # the policy wants to see the steps
        # Evaluation keeps no graphs, and more fits.
        self._capacity = {training: Capacity(k) for training in (True, False)}
        self._load_caps = {training: [math.inf] * k for training in (True, False)}
        self._learnt: StepUsage | None = None
        self._least: Least = lambda: 1

    def plan(
        self,
        n: int,
        costs: Callable[[], Sequence[float]],
        *,
        training: bool,
        reading: Any = "columns",
        telling: bool = False,
        least: Least = lambda: 1,
        kind: Hashable = None,
    ) -> Plan:
        """Decides for a batch of n samples; what they cost is asked if the split is by cost.

        If they are to be `telling`, shards become unequal by a sample, where they can, so that what
        counts samples shows. Replicas that work have at least `least()` samples, as far as n and
        memory allow; it is asked only where it may matter. Batches of a `kind` are equal in all
        that a plan may follow from, but for what is learnt.
        """
        self._least = least
        plan = None
        if isinstance(self._policy, CostSplit):
            plan = self._by_cost(self._policy, costs(), training)
        plan = plan or Plan(self._sizes(n, training))
        if telling and not any(map(math.isfinite, self._load_caps[training])):
            sizes = unequal(plan.sizes, least())
            order = plan.order and reordered(plan.order, sizes)
            plan = Plan(sizes, order) if self._capacity[training].within(sizes) == sizes else plan
        self._begin(replace(plan, reading=reading))
        if self._is_fixed and not telling and self._capacity[training].caps is None:
            # Where a device would have one sample, what replicas need may change the sizes.
            self.repeated = None if _is_small(self._policy(n)) else kind
        return self.latest

    def trial(self, n: int, *, training: bool) -> Plan | None:
        """A part of a batch of n samples that tells more about what fits; None if all is known."""
        sizes = self._capacity[training].trial(n, self._least())
        if sizes is None:
            return None
        self._begin(Plan(sizes, left_out=n - sum(sizes), reading=self.latest.reading))
        return self.latest

    def whole(self) -> Plan:
        """For a batch in which there is nothing to cut, and so nothing to learn of what fits."""
        k = len(self.latest.sizes)
        self._begin(Plan((0,) * k))
        return Plan((1, *[0] * (k - 1)), whole=True)

    def learn(self, step: StepUsage | None) -> None:
        """Shows a training step to a policy that learns, once."""
        if self._learner is not None and step is not None:
            # Steps of equal times are equal, and still two steps.
            if step is not self._learnt:
                self._learner.learn(step)
            self._learnt = step

    def record_success(self, *, training: bool) -> None:
        """The latest plan's step was done."""
        self._capacity[training].record_success(self.latest.sizes)
        self.is_recorded = True

    def record_oom(self, devices: Sequence[int], *, training: bool) -> None:
        """In the latest plan's step these devices ran out of memory: they get less from now on."""
        self.repeated, self.is_recorded = None, False
        if not self.latest.loads:
            self._capacity[training].record_oom(self.latest.sizes, devices)
            return
        for k in devices:
            self._load_caps[training][k] = self.latest.loads[k] * (1 - 1 / MARGIN)

    def has_room(self, n: int, *, training: bool) -> bool:
        """Whether there may be a split of n samples that fits."""
        return self._capacity[training].has_room(n, self._least())

    def fits(self, *, training: bool) -> Sizes:
        """The most samples that each device is known to take."""
        return self._capacity[training].fits

    def cap(self, k: int, *, training: bool) -> int | None:
        """The most samples to give a device, by what did not fit; None for no limit."""
        caps = self._capacity[training].caps
        return None if caps is None else caps[k]

    def most(self, n: int, *, training: bool) -> int:
        """The largest batch of at most n samples that is known to fit."""
        return self._capacity[training].most(n, self._least())

    def _begin(self, plan: Plan) -> None:
        self.repeated, self.is_recorded = None, False  # first: an interrupt may come in between
        self.latest = plan

    def _sizes(self, n: int, training: bool) -> Sizes:
        capacity = self._capacity[training]
        caps = capacity.caps
        if self._learner is not None:
            sizes = self._learner(n, caps if capacity.has_room(n) else None)
        else:
            wanted = self._policy(n)
            sizes = wanted if caps is None else capacity.within(wanted)
        if not _is_small(sizes):
            return sizes
        least = self._least()
        # Where the caps leave no room, memory may still do, and if not, its error is clear.
        return at_least(sizes, least, caps) or at_least(sizes, least) or sizes

    def _by_cost(self, split: CostSplit, costs: Sequence[float], training: bool) -> Plan | None:
        """None where the caps leave no room for a split by cost: then it is by number."""
        caps = self._load_caps[training]
        order = split.order(costs, caps)
        if order is None:
            return None
        sizes = wanted = tuple(map(len, order))
        if _is_small(wanted):
            # The cheapest samples move. One that has a device to itself costs much.
            sizes = at_least(wanted, self._least(), spreads=True) or wanted
            parts = [sorted(part, key=lambda i: -costs[i]) for part in order]
            order = reordered(parts, sizes)
        loads = tuple(sum(costs[i] for i in part) for part in order)
        if sizes != wanted and any(map(operator.gt, loads, caps)):
            return None
        return Plan(sizes, order, loads)


def _is_small(sizes: Sizes) -> bool:
    """Whether a device has one sample, and not because the batch has no more."""
    return 1 in sizes and sum(sizes) > 1
