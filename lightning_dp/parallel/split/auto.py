"""split="auto": as many devices work as make a step shortest, the root alone maybe.

All devices are timed, half of them, a quarter, and so on down to the root alone; the fastest number
is kept. Every 2,000 steps all are timed again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_dp.parallel.split.adaptive import Adaptive, StepUsage
from lightning_dp.parallel.split.arithmetic import Sizes, even
from lightning_dp.parallel.split.memory import Capacities

TIMED = 5  # steps of each number of devices; the first step after a change is not timed
FAR = 1.5  # a number that takes this many times the best time is timed once
EVERY = 2000  # steps after which all numbers are timed again
SAFE = 0.7
"""Share of the root's memory up to which fewer devices than all may be tried."""


class DeviceCountTuner:
    """Chooses how many of k devices work: the number whose least of a few times is shortest.

    Example:
        >>> tuner, seconds = DeviceCountTuner(4), {4: 0.5, 2: 0.6, 1: 0.4}
        >>> for _ in range(20):
        ...     count, is_timed = tuner.next_step()
        ...     if is_timed:
        ...         tuner.add(count, seconds[count])
        >>> tuner.best
        1
    """

    def __init__(self, k: int) -> None:
        self.best = self._all = k
        self._turns: list[int] = []  # numbers still to be timed, the present one first
        self._times: list[float] = []  # of the present one
        self._seconds: dict[int, float] = {}  # of those before it, the least time
        self._latest = 0  # number of the latest step
        self._step = 0

    def next_step(self, can: Callable[[int], bool] = lambda count: True) -> tuple[int, bool]:
        """The number of devices for the next step, and whether its time is wanted.

        Args:
            can: whether a number is possible for this step; an impossible one is not timed.
        """
        if self._step % EVERY == 0:
            self._turns = [self._all >> halvings for halvings in range(self._all.bit_length())]
            self._times, self._seconds = [], {}
        self._step += 1
        while self._turns and not can(self._turns[0]):
            self._end_turn()
        count = self._turns[0] if self._turns else self.best
        count = count if can(count) else self._all
        is_first, self._latest = count != self._latest, count
        return count, bool(self._turns) and not is_first

    def add(self, count: int, seconds: float) -> None:
        """Takes in a step whose time was wanted."""
        if self._turns[:1] != [count]:
            return  # a late one: devices were still at it when the next turn began
        self._times.append(seconds)
        is_far = seconds > FAR * min(self._seconds.values(), default=seconds)
        if len(self._times) == TIMED or is_far:
            self._end_turn()

    def _end_turn(self) -> None:
        count = self._turns.pop(0)
        if self._times:
            self._seconds[count], self._times = min(self._times), []
        if not self._turns and self._seconds:
            self.best = min(self._seconds, key=lambda count: (self._seconds[count], count))


@dataclass(frozen=True)
class Timing:
    """A step whose time is wanted."""

    tuner: DeviceCountTuner
    num_devices: int


class Auto:
    """A split that lets as many devices work as make a step shortest.

    Those that work share the samples by their speeds, as `Adaptive`. Each kind of step, and each
    size of batches within 25 %, has a tuner of its own. Until `begin` is called, all devices work.

    Example:
        >>> split = Auto([0, 1])
        >>> for _ in range(30):
        ...     timing = split.begin("training_step", 8)
        ...     sizes = split(8)
        ...     if timing:
        ...         split.end(timing, 1.0 if sizes == (8, 0) else 3.0)
        >>> split(8)
        (8, 0)
    """

    def __init__(self, places: Sequence[int], capacities: Capacities | None = None) -> None:
        self._k = self.num_devices = len(places)
        self._beside = [k for k, place in enumerate(places) if place == places[0]]  # on the root
        self._capacities = capacities
        self._adaptive = Adaptive(self._k)
        self._tuners: dict[tuple[str, int], DeviceCountTuner] = {}
        self._step: StepUsage | None = None
        self._is_even = False

    def __call__(self, n: int) -> Sizes:
        """The sizes for a batch of n samples."""
        if self._is_even:
            return even(n, self._k)
        if self.num_devices < self._k:
            return self._adaptive.on_fewer(n, self.num_devices)
        return self._adaptive(n)

    def begin(self, kind: str, n: int, *, is_settled: bool = True) -> Timing | None:
        """Decides how many devices work in the next step; a Timing if its time is wanted.

        Args:
            kind: the name of the step.
            n: the batch size, in samples.
            is_settled: whether the executor runs this kind by now as it will run it later.
        """
        self._is_even = False
        key = kind, round(math.log(n, 1.25))
        if key not in self._tuners:
            self._tuners[key] = DeviceCountTuner(self._k)
        tuner = self._tuners[key]
        self.num_devices, is_timed = tuner.next_step(
            lambda count: count == self._k or self._root_memory(n / count) <= SAFE
        )
        is_timed &= is_settled or self.num_devices == 1
        return Timing(tuner, self.num_devices) if is_timed else None

    def use_all(self, *, evenly: bool = False) -> None:
        """In the next step all devices work; `evenly` whatever their speeds."""
        self.num_devices, self._is_even = self._k, evenly

    def end(self, timing: Timing, seconds: float) -> None:
        """Takes in the time of a step that `begin` asked for."""
        timing.tuner.add(timing.num_devices, seconds)

    def learn(self, step: StepUsage) -> None:
        """Takes in a training step."""
        self._step = step
        if any(step.sizes[1:]):  # a device may be faster alone than beside others
            self._adaptive.learn(step)

    def _root_memory(self, samples: float) -> float:
        """The share of the root's memory that this many samples would take, by the latest step.

        All that the step added counts as its samples'. 0 where devices do not count their memory,
        infinite as long as no step was measured.
        """
        capacities = self._capacities() if self._capacities else [0]
        step = self._step
        if not capacities[0]:
            return 0.0
        if step is None or not step.peak_bytes or not step.sizes[0]:
            return math.inf
        before = sum(step.sizes[k] for k in self._beside)
        added = (step.peak_bytes[0] - step.start_bytes[0]) * max(1.0, samples / before)
        return (step.start_bytes[0] + added) / capacities[0]
