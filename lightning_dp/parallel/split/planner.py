"""The planner: which samples of a batch go where. As the policy says, within what fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_dp.parallel.split.arithmetic import (
    CostSplit,
    Order,
    Sizes,
    SplitPolicy,
    reordered,
    unequal,
)
from lightning_dp.parallel.split.capacity import MARGIN, Capacity
from lightning_dp.parallel.split.usage import LearningSplit, StepUsage


@dataclass(frozen=True)
class Plan:
    """Which samples go where.

    Attributes:
        sizes: samples per device.
        order: the positions of each device's samples in the batch; None for the batch's own order.
        loads: what each device's samples cost, where they are split by cost.
        left_out: samples of the batch that no device gets.
        whole: whether there is nothing to cut: the root gets the batch as it is.
        reading: how the batch was read, for those who cut it.
    """

    sizes: Sizes
    order: Order | None = None
    loads: tuple[float, ...] = field(default=(), repr=False)
    left_out: int = 0
    whole: bool = False
    reading: Any = "columns"


class Planner:
    """Decides for every batch, once, which samples each device gets.

    Args:
        k: the number of devices.
        policy: what decides as long as everything fits.

    Attributes:
        latest: the latest plan.
    """

    def __init__(self, k: int, policy: SplitPolicy) -> None:
        self.latest = Plan((0,) * k)
        self._policy = policy
        # Asked once: to see whether something follows a protocol takes as long as to cut a batch.
        self._learner = policy if isinstance(policy, LearningSplit) else None
        # Evaluation keeps no graphs, and more fits.
        self._capacity = {training: Capacity(k) for training in (True, False)}
        self._load_caps = {training: [math.inf] * k for training in (True, False)}
        self._learnt: StepUsage | None = None

    @property
    def learns(self) -> bool:
        """Whether the policy wants to see the steps."""
        return self._learner is not None

    def plan(
        self,
        n: int,
        costs: Callable[[], Sequence[float]],
        *,
        training: bool,
        reading: Any = "columns",
        telling: int | None = None,
    ) -> Plan:
        """Decides for a batch.

        Args:
            n: its number of samples.
            costs: asked for what they cost, if the split is by cost.
            training: whether the batch is trained on.
            reading: how the batch was read.
            telling: with a number, shards become unequal by a sample, where they can, so that what
                counts samples shows; none then has fewer samples than this.
        """
        plan = self._by_cost(costs, training) or Plan(self._sizes(n, training))
        if telling is not None and not any(map(math.isfinite, self._load_caps[training])):
            sizes = unequal(plan.sizes, telling)
            order = plan.order and reordered(plan.order, sizes)
            plan = Plan(sizes, order) if self._capacity[training].within(sizes) == sizes else plan
        self.latest = replace(plan, reading=reading)
        return self.latest

    def trial(self, n: int, *, training: bool) -> Plan | None:
        """A part of a batch of n samples that tells more about what fits; None if all is known."""
        sizes = self._capacity[training].trial(n)
        if sizes is None:
            return None
        self.latest = Plan(sizes, left_out=n - sum(sizes), reading=self.latest.reading)
        return self.latest

    def whole(self) -> Plan:
        """For a batch in which there is nothing to cut, and so nothing to learn of what fits."""
        k = len(self.latest.sizes)
        self.latest = Plan((0,) * k)
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

    def record_oom(self, devices: Sequence[int], *, training: bool) -> None:
        """In the latest plan's step these devices ran out of memory: they get less from now on."""
        if not self.latest.loads:
            self._capacity[training].record_oom(self.latest.sizes, devices)
            return
        for k in devices:
            self._load_caps[training][k] = self.latest.loads[k] * (1 - 1 / MARGIN)

    def has_room(self, n: int, *, training: bool) -> bool:
        """Whether there may be a split of n samples that fits."""
        return self._capacity[training].has_room(n)

    def fits(self, *, training: bool) -> Sizes:
        """The most samples that each device is known to take."""
        return self._capacity[training].fits

    def _sizes(self, n: int, training: bool) -> Sizes:
        capacity = self._capacity[training]
        if self._learner is not None:
            return self._learner(n, capacity.caps)
        return capacity.within(self._policy(n))

    def _by_cost(self, ask: Callable[[], Sequence[float]], training: bool) -> Plan | None:
        """None where the split is not by cost, or no longer can be: then by number."""
        if not isinstance(self._policy, CostSplit):
            return None
        costs = ask()
        order = self._policy.order(costs, self._load_caps[training])
        if order is None:
            return None
        loads = tuple(sum(costs[i] for i in part) for part in order)
        return Plan(tuple(map(len, order)), order, loads)
