"""What the devices did over many training steps, in few numbers. No tensor, no device."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_dp.parallel.split import StepUsage


@dataclass(frozen=True)
class Period:
    """What the devices did over some training steps together; one entry per replica, root first.

    Periods are added with `+`; an empty one changes nothing.

    Attributes:
        waiting_seconds: how long a device had nothing to do while others worked.
        peak_bytes: the most in use in any of the steps; 0 where devices do not count it.

    Example:
        >>> step = StepUsage((3, 1), (0.75, 0.25), step_seconds=0.75, peak_bytes=(10, 20))
        >>> period = Period.of(step) + Period.of(step)
        >>> period.steps, period.samples, period.imbalance(period.busy_seconds)
        (2, (6, 2), 1.5)
    """

    steps: int = 0
    samples: tuple[int, ...] = ()
    busy_seconds: tuple[float, ...] = ()
    waiting_seconds: tuple[float, ...] = ()
    peak_bytes: tuple[int, ...] = ()

    @classmethod
    def of(cls, step: StepUsage) -> Period:
        """The period of one step."""
        peaks = step.peak_bytes or (0,) * len(step.sizes)
        return cls(1, step.sizes, step.busy_seconds, step.waiting_seconds, peaks)

    def __add__(self, other: Period) -> Period:
        """Both periods as one."""
        if not self.steps or not other.steps:
            return self if self.steps else other
        return Period(
            self.steps + other.steps,
            tuple(map(operator.add, self.samples, other.samples)),
            tuple(map(operator.add, self.busy_seconds, other.busy_seconds)),
            tuple(map(operator.add, self.waiting_seconds, other.waiting_seconds)),
            tuple(map(max, self.peak_bytes, other.peak_bytes)),
        )

    @property
    def shares(self) -> tuple[float, ...]:
        """Each replica's part of the samples, from 0 to 1."""
        total = sum(self.samples) or 1
        return tuple(n / total for n in self.samples)

    @property
    def busy_shares(self) -> tuple[float, ...]:
        """The part of the time, from 0 to 1, in which each replica's device worked."""
        pairs = zip(self.busy_seconds, self.waiting_seconds, strict=True)
        return tuple(busy / (busy + waiting or 1) for busy, waiting in pairs)

    @staticmethod
    def imbalance(values: Sequence[float]) -> float:
        """The largest value over the mean: 1 where all are equal, K where one has everything."""
        return max(values) * len(values) / sum(values) if any(values) else 1.0


class DeviceSummary(NamedTuple):
    """What a replica did in a fit: a row of `DataParallelMonitor.summary()`, see `Period`.

    `share` is its part of all samples, `busy_share` its busy time over busy and waiting time.
    """

    device: str
    samples: int
    share: float
    busy_seconds: float
    waiting_seconds: float
    busy_share: float
    peak_bytes: int
