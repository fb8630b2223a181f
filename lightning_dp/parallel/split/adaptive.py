"""split="adaptive": samples by the devices' speeds, as the times of training steps show them."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from lightning_dp.parallel.split.arithmetic import Sizes, minimax

Line: TypeAlias = tuple[float, float]
"""Seconds of a step on one device: `(fixed, per_sample)`."""

_solve = lru_cache(maxsize=64)(minimax)  # most steps pose the same problem


@dataclass(frozen=True)
class StepUsage:
    """What the devices did in one training step; one entry per replica, root first.

    Attributes:
        sizes: its samples; 0 where it had none.
        busy_seconds: how long its device worked: by events on GPUs, else as its worker saw it.
        step_seconds: how long the step took until the last device was done, as far as
            `busy_seconds` covers it.
        peak_bytes: the most bytes in use on its device during the step; 0 where none counts.
        start_bytes: the bytes in use on its device when the step began; 0 where none counts.
        in_turns: whether several replicas on the CPU ran one after another.
    """

    sizes: Sizes
    busy_seconds: tuple[float, ...]
    step_seconds: float = 0.0
    peak_bytes: tuple[int, ...] = ()
    start_bytes: tuple[int, ...] = ()
    in_turns: bool = False

    @property
    def waiting_seconds(self) -> tuple[float, ...]:
        """How long each replica's device had nothing to do during the step."""
        return tuple(self.step_seconds - busy for busy in self.busy_seconds)


KEPT_TIMES = 8  # latest steps of each device that are kept
WARM_UP = 1  # first steps that are not used: they build caches
PAUSE = 2  # steps after a change of the split until the next one
MIN_GAIN = 0.01  # share of a step's time that another split has to gain
NOISE_FACTOR = 3  # how many times the noise of equal steps another split has to gain


class Adaptive:
    """A split that follows the devices' speeds, so that all end a step at the same time.

    It begins even, or with given shares. A line `fixed + per_sample * n` is fitted to each device's
    latest times. The best split is the `minimax` of these lines. It is adopted only if it beats
    both the initial and the present split by more than 1 % and by more than three times the noise
    of equal steps. If it does not beat the initial split by that much, the initial split is used
    again. A device that is left without samples is not measured again.

    Example:
        >>> split = Adaptive(2)
        >>> for _ in range(8):
        ...     a, b = split(12)
        ...     split.learn(StepUsage((a, b), (a * 0.1, b * 0.2)))
        >>> split(12)
        (8, 4)
    """

    def __init__(self, k: int, weights: Sequence[float] | None = None) -> None:
        self._first: list[Line] = [(0.0, 1 / weight) for weight in weights or [1.0] * k]
        self._lines = self._first  # of the present split
        self._times: list[deque[tuple[int, float]]] = [deque(maxlen=KEPT_TIMES) for _ in range(k)]
        self._steps = 0
        self._next_decision = WARM_UP + PAUSE  # at this step

    def __call__(self, n: int) -> Sizes:
        """The sizes for a batch of n samples."""
        return self.on_fewer(n, len(self._first))

    def on_fewer(self, n: int, count: int) -> Sizes:
        """The sizes for the root and the `count - 1` devices that end an equal share first."""
        seconds = [fixed + per_sample * n / count for fixed, per_sample in self._lines]
        ranked = [0, *sorted(range(1, len(seconds)), key=seconds.__getitem__)]
        caps = tuple(n if k in ranked[:count] else 0 for k in range(len(seconds)))
        return _solve(n, *zip(*self._lines, strict=True), caps)

    def learn(self, step: StepUsage) -> None:
        """Takes in a training step."""
        self._steps += 1
        if self._steps <= WARM_UP:
            return
        for times, n, seconds in zip(self._times, step.sizes, step.busy_seconds, strict=True):
            if n and seconds > 0:
                times.append((n, seconds))
        if self._steps < self._next_decision or not all(self._times):
            return
        lines = list(map(_line, self._times))
        n, noise = sum(step.sizes), max(map(_relative_noise, self._times, step.sizes))
        worth = 1 + max(MIN_GAIN, NOISE_FACTOR * noise)
        best = _solve(n, *zip(*lines, strict=True))
        least = _slowest(best, lines)
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
