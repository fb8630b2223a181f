"""split="auto": as many devices work as make a step shortest, the root alone maybe.

Measured are all devices, the root alone, and one number in between if a model of the step promises
much of it. The fastest number is kept, and the next best is measured again seldom.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_dp.parallel.split.arithmetic import Caps, Sizes, even, fitted
from lightning_dp.parallel.split.learning import Adaptive, Capacities, LearningSplit, StepUsage

ROUNDS = 5  # measured steps of each number of devices; the first step after a change is not used
FAR = 1.5  # times the best time that a number takes for which two measured steps are enough
CLOSE = 0.1  # relative difference of the two best times below which both are measured again, once
LOOK = 2  # measured steps of another number in a look, to see whether it has become faster
GAIN = 0.05  # what another number has to gain in a look for both to be measured anew
LOOK_COST = 0.01  # share of the time that looks may take
PROMISING = 0.9  # share of the best time below which a number that the model promises is measured
MOVED = 32  # times are dropped if more than one in 32 of a number's samples changed device
SAFE = 0.7
"""Share of the root's memory up to which fewer devices than all may be tried."""


class DeviceCountTuner:
    """Measures steps with several numbers of devices, and keeps the fastest number.

    Example:
        >>> tuner, seconds = DeviceCountTuner([4, 1]), {4: 0.5, 1: 0.4}
        >>> for _ in range(40):
        ...     count, is_timed = tuner.next_step()
        ...     if is_timed:
        ...         tuner.add(count, seconds[count], (count,))
        >>> tuner.best
        1
    """

    def __init__(self, counts: Sequence[int]) -> None:
        self.best: int | None = None  # None until all counts were measured
        self.seconds: dict[int, float] = {}  # the median of each count's latest turn
        self._all = max(counts)
        self._turns = list(counts)  # counts to be measured; the first one is being measured
        self._times: list[float] = []  # of this turn; between turns, the best count's latest
        self.sizes: dict[int, Sizes] = {}
        self._is_look = self._was_close = False
        self._latest: int | None = None  # count of the latest step
        self._steps_to_look = 0

    def next_step(self, can: Callable[[int], bool] = lambda count: True) -> tuple[int, bool]:
        """The number of devices for the next step, and whether its time is wanted.

        Args:
            can: whether a number is possible for this step; an impossible one is not measured.
        """
        if not self._turns:
            self._steps_to_look -= 1
            others = sorted(self.seconds.keys() - {self.best}, key=self.seconds.__getitem__)
            if self._steps_to_look < 0 and others and self._times:
                self._turns, self._is_look = [others[0]], True
                self.seconds[self._best] = statistics.median(self._times[-ROUNDS:])
                self._times = []
        while self._turns and not can(self._turns[0]):
            self.seconds.pop(self._turns.pop(0), None)
            self._times = []
            if not self._turns:
                self._settle()
        count = self._turns[0] if self._turns else self._best
        count = count if can(count) else self._all
        is_first, self._latest = count != self._latest, count
        return count, not is_first and (bool(self._turns) or self._steps_to_look < 2 * ROUNDS)

    def add(self, count: int, seconds: float, sizes: Sizes) -> None:
        """Takes in a step whose time was wanted."""
        if count != (self._turns[0] if self._turns else self.best):
            return  # a late one: devices were still at it when the next turn began
        before = self.sizes.get(count, sizes)
        self.sizes[count] = sizes
        moved = sum(abs(a - b) for a, b in zip(before, sizes, strict=True)) // 2
        if sum(before) == sum(sizes) and moved > max(1, sum(sizes) // MOVED):
            self._times = []
        self._times.append(seconds)
        if self._turns and self._has_enough():
            del self._turns[0]
            self.seconds[count], self._times = statistics.median(self._times), []
            if self._is_look:
                self._end_look(count)
            elif not self._turns:
                self._settle()

    def measure(self, count: int) -> None:
        """Measures one more count, and then compares again."""
        if count not in self.seconds:
            self._turns.append(count)

    @property
    def is_comparing(self) -> bool:
        """Whether counts are being measured now."""
        return bool(self._turns)

    @property
    def _best(self) -> int:
        return self._all if self.best is None else self.best

    def _has_enough(self) -> bool:
        others = [seconds for count, seconds in self.seconds.items() if count != self._turns[0]]
        is_far = bool(others) and min(self._times) > FAR * min(others)
        return len(self._times) >= (LOOK if self._is_look or is_far else ROUNDS)

    def _settle(self) -> None:
        """Keeps the fastest count; measures the two best once more if they are close."""
        self._is_look = False
        ranked = sorted(self.seconds, key=lambda count: (self.seconds[count], count))
        if not ranked:
            return
        is_close = len(ranked) > 1 and (
            self.seconds[ranked[1]] <= (1 + CLOSE) * self.seconds[ranked[0]]
        )
        if is_close and not self._was_close:
            self._turns, self._was_close = ranked[:2], True
            return
        self.best, self._was_close = ranked[0], False
        self._plan_look()

    def _plan_look(self) -> None:
        """Another number may take many times as long: then it is rarely looked at."""
        others = [seconds for count, seconds in self.seconds.items() if count != self.best]
        price = 8 * min(others, default=0.0) / self.seconds[self._best]
        self._steps_to_look = math.ceil(price / LOOK_COST)

    def _end_look(self, count: int) -> None:
        self._is_look = False
        if self.seconds[count] < (1 - GAIN) * self.seconds[self._best]:
            self._turns = [self._best, count]  # both anew: the machine may just have been busy
        else:
            self._plan_look()


@dataclass(frozen=True)
class Timing:
    """A step whose time is wanted."""

    tuner: DeviceCountTuner
    num_devices: int
    n: int


class Auto(LearningSplit):
    """A split that lets as many devices work as make a step shortest.

    Those that work share the samples by their speeds, as `Adaptive`. Each kind of step, and each
    size of batches within 25 %, has a tuner of its own. Until `begin` is called, all devices work.

    Example:
        >>> split = Auto([0, 1])
        >>> for _ in range(30):
        ...     timing = split.begin("training_step", 8)
        ...     sizes = split(8)
        ...     if timing:
        ...         split.end(timing, 1.0 if sizes == (8, 0) else 3.0, sizes)
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

    def __call__(self, n: int, caps: Caps | None = None) -> Sizes:
        """The sizes for a batch of n samples, none above its cap."""
        if self._is_even:
            sizes = even(n, self._k)
            return fitted(sizes, caps) or sizes
        if self.num_devices < self._k:
            return self._adaptive.on_fewer(n, self.num_devices - 1, caps)
        return self._adaptive(n, caps)

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
            self._tuners[key] = DeviceCountTuner([self._k, 1])
        tuner = self._tuners[key]
        self.num_devices, is_timed = tuner.next_step(
            lambda count: count == self._k or self._root_memory(n / count) <= SAFE
        )
        is_timed &= is_settled or self.num_devices == 1
        return Timing(tuner, self.num_devices, n) if is_timed else None

    def use_all(self, *, evenly: bool = False) -> None:
        """In the next step all devices work; `evenly` whatever their speeds."""
        self.num_devices, self._is_even = self._k, evenly

    def end(self, timing: Timing, seconds: float, sizes: Sizes) -> None:
        """Takes in the time of a step that `begin` asked for, and its sizes."""
        tuner, was_comparing = timing.tuner, timing.tuner.is_comparing
        tuner.add(timing.num_devices, seconds, sizes)
        if was_comparing and not tuner.is_comparing:
            promising = self._promising(tuner, timing.n)
            if promising is not None:
                tuner.measure(promising)

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

    def _promising(self, tuner: DeviceCountTuner, n: int) -> int | None:
        """A number in between that should be faster by much than all, and than the root alone.

        What a step takes beyond its slowest device's work (Python, launches, copies over the root's
        link) is on a line between what it is for the root alone and for all.
        """
        ends = (1, self._k)
        if self._adaptive.measured_lines is None or not tuner.sizes.keys() >= {*ends}:
            return None
        beyond = [tuner.seconds[c] - self._adaptive.seconds(tuner.sizes[c]) for c in ends]
        best, promised = None, PROMISING * min(tuner.seconds.values())
        for count in range(2, self._k):
            work = self._adaptive.seconds(self._adaptive.on_fewer(n, count - 1))
            part = (count - 1) / (self._k - 1)
            seconds = work + beyond[0] + max(0.0, beyond[1] - beyond[0]) * part
            if seconds < promised:
                best, promised = count, seconds
        return best
