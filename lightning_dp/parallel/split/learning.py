"""Splits that learn from what the devices did in training steps: by time, by memory.

A policy that learns returns the sizes for a batch when it is called, and takes in each step that
the devices have finished by `learn(step)`.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from lightning_dp.parallel.split.optimal import Sizes, minimax

log = logging.getLogger("lightning_dp")

Line: TypeAlias = tuple[float, float]
"""Seconds of a step on one device: `(fixed, per_sample)`."""

Capacities: TypeAlias = Callable[[], Sequence[int]]
"""Returns for each replica the bytes that this process can have on its device."""

_solve = lru_cache(maxsize=64)(minimax)  # most steps pose the same problem


@dataclass(frozen=True)
class StepUsage:
    """What the devices did in one training step; one entry per replica, root first.

    Attributes:
        sizes: its samples; 0 where it had none.
        busy_seconds: how long its device worked: by events on GPUs, else as its worker saw it.
        step_seconds: how long the step took: by the clock on the CPU, elsewhere the longest of
            `busy_seconds`.
        peak_bytes: the most bytes in use on its device during the step; 0 on the CPU.
        start_bytes: the bytes in use on its device when the step began; 0 on the CPU.
    """

    sizes: Sizes
    busy_seconds: tuple[float, ...]
    step_seconds: float = 0.0
    peak_bytes: tuple[int, ...] = ()
    start_bytes: tuple[int, ...] = ()

    @property
    def waiting_seconds(self) -> tuple[float, ...]:
        """How long each replica's device had nothing to do during the step."""
        return tuple(self.step_seconds - busy for busy in self.busy_seconds)


# --- split="adaptive"

KEPT_TIMES = 8  # latest steps of each device that are kept
WARM_UP = 1  # first steps that are not used: they build caches
PAUSE = 2  # steps after a change of the split until the next one
MIN_GAIN = 0.01  # share of a step's time that another split has to gain
NOISE_FACTOR = 3  # how many times the noise of equal steps another split has to gain
LOOK_AGAIN = 100  # steps after which a device without samples is timed again


class Adaptive:
    """A split that follows the devices' speeds, so that all end a step at the same time.

    It begins even, or with given shares. A line `fixed + per_sample * n` is fitted to each device's
    latest times. The best split is the `minimax` of these lines. It is adopted only if it beats
    both the initial and the present split by more than 1 % and by more than three times the noise
    of equal steps. If it does not beat the initial split by that much, the initial split is used
    again. A device that is left without samples gets one every 100 steps, to be timed again.

    Example:
        >>> split = Adaptive(2)
        >>> for _ in range(8):
        ...     a, b = split(12)
        ...     split.learn(StepUsage((a, b), (a * 0.1, b * 0.2)))
        >>> split(12)
        (8, 4)
    """

    def __init__(self, k: int, weights: Sequence[float] | None = None) -> None:
        self._first: list[Line] = [(0.0, 1 / float(weight)) for weight in weights or [1.0] * k]
        self._lines = self._first  # of the present split
        self._times: list[deque[tuple[int, float]]] = [deque(maxlen=KEPT_TIMES) for _ in range(k)]
        self._latest: Sizes = ()  # of the latest step
        self._steps = 0
        self._next_decision = WARM_UP + PAUSE  # at this step

    def __call__(self, n: int) -> Sizes:
        """The sizes for a batch of n samples."""
        sizes = list(_solve(n, *zip(*self._lines, strict=True)))
        if self._steps % LOOK_AGAIN == 0 and n >= len(sizes):
            for k in [k for k, size in enumerate(sizes) if not size]:
                sizes[sizes.index(max(sizes))] -= 1
                sizes[k] = 1
        return tuple(sizes)

    def on_first(self, count: int, n: int) -> Sizes:
        """The sizes if only the first `count` devices work."""
        caps = tuple(n if i < count else 0 for i in range(len(self._lines)))
        return _solve(n, *zip(*self._lines, strict=True), caps)

    def learn(self, step: StepUsage) -> None:
        """Takes in a training step."""
        self._steps += 1
        if self._steps <= WARM_UP:
            return
        before, self._latest = self._latest or step.sizes, step.sizes
        for k, (n, seconds) in enumerate(zip(step.sizes, step.busy_seconds, strict=True)):
            if n and seconds > 0:
                if not before[k]:
                    self._times[k].clear()  # it may have changed while it was idle
                self._times[k].append((n, seconds))
        if self._steps < self._next_decision or not all(self._times):
            return
        lines = list(map(_line, self._times))
        n, noise = sum(step.sizes), max(map(_relative_noise, self._times, step.sizes))
        worth = 1 + max(MIN_GAIN, NOISE_FACTOR * noise)
        least = _slowest(_solve(n, *zip(*lines, strict=True)), lines)
        if _slowest(_solve(n, *zip(*self._first, strict=True)), lines) < worth * least:
            lines = self._first
        elif _slowest(step.sizes, lines) < worth * least:
            return
        if lines is not self._lines:
            self._lines, self._next_decision = lines, self._steps + PAUSE


def _slowest(sizes: Sizes, lines: Sequence[Line]) -> float:
    """Seconds that the slowest device takes with these sizes, by the devices' lines."""
    ends = (a + b * n for n, (a, b) in zip(sizes, lines, strict=True) if n)
    return max(ends, default=0.0)


def _line(times: Sequence[tuple[int, float]]) -> Line:
    """The line through the times of the fewest and the most samples; from 0 if these are close."""
    low, high = min(n for n, _ in times), max(n for n, _ in times)
    # Two sizes have to be far apart for their times to differ by more than noise.
    if high - low >= max(2, high // 4):
        slope = (_seconds(times, high) - _seconds(times, low)) / (high - low)
        fixed = _seconds(times, low) - slope * low
        if slope > 0 and fixed >= 0:
            return fixed, slope
    latest = times[-1][0]
    return 0.0, _seconds(times, latest) / latest


def _seconds(times: Sequence[tuple[int, float]], samples: int) -> float:
    """The shorter one of the two latest times of a size: noise only adds time."""
    return min([seconds for n, seconds in times if n == samples][-2:])


def _relative_noise(times: Sequence[tuple[int, float]], samples: int) -> float:
    """How far the median time of steps of this size is above the shortest, relative to that."""
    of_size = [seconds for n, seconds in times if n == samples]
    return statistics.median(of_size) / min(of_size) - 1 if of_size else 0.0


# --- split="memory"

KEPT_STEPS = 16  # latest steps that are kept: the split is for the heaviest of their batches
SAME = 0.02  # relative difference below which steps are equally heavy


class Memory:
    """A split that leaves equally much memory free on every device.

    A device's peak is `fixed + per_sample * samples`. Fixed are weights, gradients, the optimizer's
    state and gathered outputs: usually more on the root. `per_sample` is the same everywhere, since
    the module is: the least that a device added per sample in the heaviest of the latest 16 steps.
    The rest of that step's peaks is `fixed`. `minimax` of peak minus capacity then gives equal
    free memory. All that a step adds counts as its samples', so each split moves too few samples
    rather than too many. The first step is even, and every one where replicas share a device.

    Example:
        >>> split = Memory(2, lambda: [1000, 1000])
        >>> split(20)
        (10, 10)
        >>> split.learn(StepUsage((10, 10), (1, 1), 1, (520, 400), start_bytes=(270, 150)))
        >>> split(20)  # at most 25 bytes per sample
        (8, 12)
    """

    def __init__(self, k: int, capacities: Capacities, *, is_shared: bool = False) -> None:
        self._capacities, self._is_shared, self._has_warned = capacities, is_shared, False
        self._steps: deque[StepUsage] = deque(maxlen=KEPT_STEPS)
        self._used, self._per_sample = [0.0] * k, 1.0  # of each device, fixed - capacity

    def __call__(self, n: int) -> Sizes:
        """The sizes for a batch of n samples."""
        return minimax(n, self._used, [self._per_sample] * len(self._used))

    def learn(self, step: StepUsage) -> None:
        """Takes in a training step: each device's samples, its bytes before it and at its peak."""
        if self._is_shared or not any(step.peak_bytes):
            if not self._has_warned:
                log.warning(
                    "split='memory': replicas on one device, as on the CPU, share one memory, so "
                    "there is nothing to learn, and every batch is split evenly. Use split='even'."
                )
            self._has_warned = True
            return
        self._steps.append(step)
        heaviest = max(sum(step.peak_bytes) for step in self._steps)
        heavy = [s for s in self._steps if sum(s.peak_bytes) >= (1 - SAME) * heaviest][-1]
        devices = list(zip(heavy.sizes, heavy.start_bytes, heavy.peak_bytes, strict=True))
        added = min((peak - start) / n for n, start, peak in devices if n)
        self._per_sample = max(1.0, added)
        self._used = [
            peak - self._per_sample * n - capacity
            for (n, _, peak), capacity in zip(devices, self._capacities(), strict=True)
        ]


# --- split="auto"

TIMED = 5  # steps of each number of devices; the first step after a change is not timed
FAR = 1.5  # a number that takes this many times the best time is timed once
FIRST_ROUND, LONGEST_ROUND = 100, 500  # steps until all numbers are timed again, growing
SAFE = 0.7
"""Share of the root's memory up to which fewer devices than all may be tried."""


class DeviceCountTuner:
    """Chooses how many of k devices work: the number that had the shortest step.

    A few steps of each number are timed: k, half of it, a quarter, and so on down to the root.

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
        self._all = k
        self._turns: list[int] = []  # numbers still to be timed, the present one first
        self._times: dict[int, list[float]] = {}  # of this round
        self._step = self._next_round = 0
        self._latest = 0  # number of the latest step

    @property
    def best(self) -> int:
        """The fastest number of this round; of equally fast ones the least."""
        return min(self._times, key=lambda m: (min(self._times[m]), m), default=self._all)

    def next_step(self, can: Callable[[int], bool] = lambda count: True) -> tuple[int, bool]:
        """The number of devices for the next step, and whether its time is wanted.

        Args:
            can: whether a number is possible for this step; an impossible one is not timed.
        """
        if self._step == self._next_round:
            self._turns = [self._all >> halvings for halvings in range(self._all.bit_length())]
            self._times = {}
            self._next_round += min(self._step + FIRST_ROUND, LONGEST_ROUND)
        self._step += 1
        while self._turns and not can(self._turns[0]):
            self._turns.pop(0)
        count = self._turns[0] if self._turns else self.best
        count = count if can(count) else self._all
        is_first, self._latest = count != self._latest, count
        return count, bool(self._turns) and not is_first

    def add(self, count: int, seconds: float) -> None:
        """Takes in a step whose time was wanted."""
        is_far = seconds > FAR * min(map(min, self._times.values()), default=seconds)
        times = self._times.setdefault(count, [])
        times.append(seconds)
        if self._turns[:1] == [count] and (is_far or len(times) == TIMED):
            self._turns.pop(0)


class Auto:
    """A split that lets as many devices work as make a step shortest.

    The first devices share the samples by their speeds as `Adaptive`. Each kind of step, and each
    size of batches within 25 %, has its tuner. `auto_split` times steps between `begin` and `end`.

    Example:
        >>> split = Auto(2)
        >>> for _ in range(30):
        ...     is_timed = split.begin("training_step", 8)
        ...     sizes = split(8)
        ...     if is_timed:
        ...         split.end(1.0 if sizes == (8, 0) else 3.0)
        >>> split(8)
        (8, 0)
    """

    def __init__(self, k: int, capacities: Capacities | None = None) -> None:
        self._k = self.num_devices = k
        self._capacities = capacities
        self._adaptive = Adaptive(k)
        self._tuners: dict[tuple[str, int], DeviceCountTuner] = {}
        self._tuner = DeviceCountTuner(k)  # of the latest step
        self._step: StepUsage | None = None
        self._is_even = False

    def __call__(self, n: int) -> Sizes:
        """The sizes for a batch of n samples."""
        if self._is_even:
            return _solve(n, (0.0,) * self._k, (1.0,) * self._k)
        if self.num_devices < self._k:
            return self._adaptive.on_first(self.num_devices, n)
        return self._adaptive(n)

    def begin(self, kind: str, n: int, *, is_settled: bool = True) -> bool:
        """Decides how many devices work in the next step; returns whether `end` wants its time.

        Args:
            kind: the name of the step.
            n: the batch size, in samples.
            is_settled: whether the executor runs this kind by now as it will run it later.
        """
        self._is_even = False
        key = kind, round(math.log(n, 1.25))
        self._tuner = self._tuners.setdefault(key, DeviceCountTuner(self._k))
        self.num_devices, is_timed = self._tuner.next_step(
            lambda count: count == self._k or self._root_memory(n / count) <= SAFE
        )
        return is_timed and (is_settled or self.num_devices == 1)

    def use_all(self, *, evenly: bool = False) -> None:
        """In the next step all devices work; `evenly` whatever their speeds."""
        self.num_devices, self._is_even = self._k, evenly

    def end(self, seconds: float) -> None:
        """Takes in the time of the step that `begin` decided about."""
        self._tuner.add(self.num_devices, seconds)

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
        capacity = self._capacities()[0] if self._capacities else 0
        step = self._step
        if not capacity:
            return 0.0
        if step is None or not step.peak_bytes or not step.sizes[0]:
            return math.inf
        added = (step.peak_bytes[0] - step.start_bytes[0]) * max(1.0, samples / step.sizes[0])
        return (step.start_bytes[0] + added) / capacity
