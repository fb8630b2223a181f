"""The planner: which samples of a batch go where, by the policy and within what fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from lightning_dp.parallel.split.adaptive import StepUsage
from lightning_dp.parallel.split.arithmetic import (
    Order,
    Sizes,
    SplitPolicy,
    by_cost,
    even,
    fitted,
)

Least: TypeAlias = Callable[[], int]
"""Returns the fewest samples that a replica can work with."""


@dataclass(frozen=True)
class Plan:
    """Which samples go where."""

    sizes: Sizes
    order: Order | None = None  # None for the batch's own order
    whole: bool = False  # nothing can be cut: the root gets the batch as it is
    reading: Any = "columns"  # how the batch was read, for `cut`


class CostSplit:
    """split="cost": the planner asks for `parts`; where these do not fit, it takes even sizes."""

    def __init__(self, k: int) -> None:
        self._k = k

    def __call__(self, n: int) -> Sizes:
        """The sizes for n samples of equal cost."""
        return even(n, self._k)

    def parts(self, costs: Sequence[float] | Tensor) -> Order:
        """Which samples each device gets."""
        return by_cost(costs, self._k).parts


class Planner:
    """Decides for every batch, once, which samples each device gets.

    A device that ran out of memory gets at most as many samples as did not fit, less an eighth,
    from then on. Evaluation keeps no graphs, so it has caps of its own. Where there are caps, a
    split by cost becomes one by number.

    Example:
        >>> from lightning_dp.parallel.split import split_policy
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
        self._learn: Callable[[StepUsage], None] | None = getattr(policy, "learn", None)
        self._parts_by_cost: Callable[..., Order] | None = getattr(policy, "parts", None)
        self.learns = self._learn is not None
        self._caps: dict[bool, list[int | None]] = {t: [None] * k for t in (True, False)}
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
        caps = self._caps[training]
        has_caps = caps.count(None) < len(caps)
        if self._parts_by_cost is not None and not has_caps:
            parts = self._parts_by_cost(costs())
            sizes = tuple(map(len, parts))
            if not _has_single(sizes) or least() == 1:
                is_sliced = all(isinstance(part, range) for part in parts)
                self.latest = Plan(sizes, None if is_sliced else parts, reading=reading)
                return self.latest
        sizes = wanted = self.policy(n)
        if has_caps or _has_single(wanted):
            # If the caps have no room, the step is tried without them: memory may be free by now.
            fewest = least()
            sizes = fitted(wanted, caps, fewest) or fitted(wanted, None, fewest) or wanted
        self.latest = Plan(sizes, reading=reading)
        return self.latest

    def whole(self) -> Plan:
        """The plan of a batch in which nothing can be cut; what fits cannot be learnt from it."""
        k = len(self.latest.sizes)
        self.latest = Plan((0,) * k)
        return Plan((1, *[0] * (k - 1)), whole=True)

    def learn(self, step: StepUsage | None) -> None:
        """Shows a training step, once, to a policy that learns."""
        if self._learn is not None and step is not None and step is not self._learnt:
            self._learn(step)
            self._learnt = step

    def record_oom(self, devices: Sequence[int], *, training: bool) -> None:
        """Caps devices that ran out of memory in the latest plan's step, below what did not fit."""
        for k in devices:
            failed = self.latest.sizes[k]
            self._caps[training][k] = failed - max(1, failed // 8)

    def has_room(self, n: int, *, training: bool) -> bool:
        """Whether there is a split of n samples within the caps."""
        caps = self._caps[training]
        return fitted(even(n, len(caps)), caps, self._least()) is not None


def _has_single(sizes: Sizes) -> bool:
    """Whether a device has one sample, and not because the batch has no more."""
    return 1 in sizes and sum(sizes) > 1
