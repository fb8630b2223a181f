"""What the devices did over many training steps, in few numbers. No tensor, no device."""

from __future__ import annotations

import operator
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_dp.parallel.split import StepUsage


@dataclass(frozen=True)
class Period:
    """What the devices did over some training steps together; one entry per replica, root first.

    Periods are added with `+`; an empty one changes nothing.

    Example:
        >>> step = StepUsage((3, 1), (0.75, 0.25), step_seconds=0.75, peak_bytes=(10, 20))
        >>> period = Period.of(step) + Period.of(step)
        >>> period.steps, period.samples, period.peak_bytes
        (2, (6, 2), (10, 20))
        >>> period.imbalance(period.busy_seconds)
        1.5
    """

    steps: int = 0
    samples: tuple[int, ...] = ()
    busy_seconds: tuple[float, ...] = ()
    waiting_seconds: tuple[float, ...] = ()  # in which its device had nothing to do, as others did
    peak_bytes: tuple[int, ...] = ()  # the most in use in any of the steps; 0 where none counts

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
        total = sum(self.samples)
        return tuple(n / total if total else 0.0 for n in self.samples)

    @property
    def waiting_share(self) -> float:
        """The part of all devices' time, from 0 to 1, that went by waiting."""
        waiting, busy = sum(self.waiting_seconds), sum(self.busy_seconds)
        return waiting / (waiting + busy) if waiting + busy else 0.0

    @staticmethod
    def imbalance(values: Sequence[float]) -> float:
        """The largest value over the mean: 1 where all are equal, K where one has everything."""
        return max(values) * len(values) / sum(values) if any(values) else 1.0


class DeviceSummary(NamedTuple):
    """What a replica did in a fit: a row of `DataParallelMonitor.summary()`."""

    device: str
    """The replica's name: that of its device, with a number where several replicas share it."""
    samples: int
    """Samples in all steps together."""
    share: float
    """Its part of all samples, from 0 to 1."""
    busy_seconds: float
    """Seconds in which the device worked for it, in all steps together."""
    waiting_seconds: float
    """Seconds of these steps in which it did not."""
    busy_share: float
    """Its busy time over both, from 0 to 1."""
    peak_bytes: int
    """The most bytes in use on the device in any step; 0 where devices do not count them."""


@dataclass(frozen=True)
class Fit:
    """A fit as it is shown: its replicas, root first, in total and over time."""

    names: Sequence[str]  # of the replicas
    devices: Sequence[str]  # theirs
    total: Period
    periods: Sequence[Period]
    capacities: Sequence[int]  # bytes that the devices have; 0 where nobody knows
    note: str | None = None  # what else is to be said

    def rows(self) -> list[DeviceSummary]:
        """What each replica did."""
        total = self.total
        both = list(map(operator.add, total.busy_seconds, total.waiting_seconds))
        shares = [x / y if y else 0.0 for x, y in zip(total.busy_seconds, both, strict=True)]
        columns = total.samples, total.shares, total.busy_seconds, total.waiting_seconds
        return list(map(DeviceSummary, self.names, *columns, shares, total.peak_bytes))


class Turns:
    """The steps in which replicas on the CPU ran one after another, and why they did.

    Example:
        >>> turns = Turns()
        >>> turns.why = 'executor="inorder"'
        >>> turns.add(StepUsage((2, 2), (0.01, 0.01), 0.022, in_turns=True))
        >>> print(turns.note(of=1).partition(": ")[2])
        while one works, the others wait. Such a step took 22.0 ms; one device needs at most about \
20.0 ms.
    """

    KEPT = 256
    """Latest steps whose times are kept: the first ones take longer."""

    def __init__(self) -> None:
        self.steps = 0
        self.why = ""
        self._alone = deque[float](maxlen=self.KEPT)
        self._together = deque[float](maxlen=self.KEPT)

    def add(self, step: StepUsage) -> None:
        """Takes in the next step, if it is one of these."""
        if step.in_turns:
            self.steps += 1
            # They do together what one device does: what is fixed in a step even several times.
            self._alone.append(sum(step.busy_seconds))
            self._together.append(step.step_seconds)

    def note(self, of: int) -> str | None:
        """What to say, if it is at least half `of` all steps."""
        if not self.steps or 2 * self.steps < of:
            return None
        which = "all" if self.steps == of else f"{self.steps:,} of {of:,}"
        together, alone = map(statistics.median, (self._together, self._alone))
        return (
            f"The replicas took turns in {which} steps ({self.why}): while one works, the others "
            f"wait. Such a step took {together * 1e3:.1f} ms; one device needs at most about "
            f"{alone * 1e3:.1f} ms."
        )


class History:
    """At most so many periods, oldest first: few enough to draw, however long the training is.

    All but the latest span equally many steps. When there are too many, every two become one.

    Example:
        >>> history = History(limit=4)
        >>> for _ in range(11):
        ...     history.add(Period.of(StepUsage((2,), (0.1,), 0.1)))
        >>> [period.steps for period in history.periods]
        [4, 4, 3]
    """

    def __init__(self, limit: int) -> None:
        self.periods: list[Period] = []
        self._limit = limit
        self._span = 1

    def add(self, step: Period) -> None:
        """Takes in the next step."""
        if len(self.periods) == self._limit and self.periods[-1].steps == self._span:
            self._halve()
        if self.periods and self.periods[-1].steps < self._span:
            self.periods[-1] += step
        else:
            self.periods.append(step)

    def _halve(self) -> None:
        pairs = [self.periods[i : i + 2] for i in range(0, len(self.periods), 2)]
        self.periods = [sum(pair, Period()) for pair in pairs]
        self._span *= 2
