"""Splits that learn from the training steps: by the devices' times, or by their memory."""

from __future__ import annotations

import logging
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from lightning_dp.parallel.split.arithmetic import Sizes, even, minimax

log = logging.getLogger("lightning_dp")

Capacities: TypeAlias = Callable[[], Sequence[int]]
"""Returns for each replica the bytes that this process can have on its device."""

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
NOISE_FACTOR = 3  # how many times the scatter of equal steps another split has to gain


class Adaptive:
    """A split that follows the devices' speeds, so that all end a step at the same time.

    It begins even, or with given shares. The rule: a device's time is `fixed + per_sample * n`,
    as its latest steps show; of the splits that it began with and that it has, each is replaced by
    the `minimax` of these lines where the step gets shorter by 1 %, and by three times what the
    times of equal steps scatter. A device that is left without samples is not measured again.

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
        n, noise = sum(step.sizes), max(map(_scatter, self._times, step.sizes))
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
    """What the slowest device takes with these sizes."""
    ends = (a + b * n for n, (a, b) in zip(sizes, lines, strict=True) if n)
    return max(ends, default=0.0)


def _line(times: Sequence[tuple[int, float]]) -> Line:
    """Through the times of the fewest and the most samples, if these are far apart; else from 0."""
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


def _scatter(times: Sequence[tuple[int, float]], samples: int) -> float:
    """How far the times of one size scatter above their shortest, relative to it."""
    of_size = [seconds for n, seconds in times if n == samples]
    return statistics.median(of_size) / min(of_size) - 1 if of_size else 0.0


KEPT_STEPS = 16  # latest steps that are kept: the split is for the heaviest of their batches
SAME = 0.02  # relative difference below which steps are equally heavy, and shares equally good


class Memory:
    """A split that leaves equally much memory free on every device.

    A device's peak is `fixed + per_sample * samples`. Fixed are weights, gradients, the optimizer's
    state and gathered outputs: usually more on the root. What a sample takes is the same
    everywhere, since the module is. The rule: the heaviest of the latest 16 steps tells both, the
    least that a device added per sample, and what is left of each peak; `minimax` of peak minus
    capacity gives equal free memory. All that a step adds counts as its samples', so each split
    moves too few samples rather than too many. The first step is even. Replicas whose `places` are
    the same number share one device's memory.

    Example:
        >>> split = Memory([0, 1], lambda: [1000, 1000])
        >>> split(20)
        (10, 10)
        >>> split.learn(StepUsage((10, 10), (1, 1), 1, (520, 400), start_bytes=(270, 150)))
        >>> split(20)  # at most 25 bytes per sample
        (8, 12)
    """

    def __init__(self, places: Sequence[int], capacities: Capacities) -> None:
        self._k, self._capacities = len(places), capacities
        self._replicas = [
            [k for k, place in enumerate(places) if place == device]
            for device in sorted(set(places))
        ]
        self._steps: deque[StepUsage] = deque(maxlen=KEPT_STEPS)
        self._per_sample = 1.0
        self._used: list[float] = []  # of each device, fixed - capacity; empty until measured
        self._shares: Sizes = ()  # of each device in the latest split
        self._has_warned = False

    def __call__(self, n: int) -> Sizes:
        """The sizes for a batch of n samples."""
        if not self._used:
            return even(n, self._k)
        shares = minimax(n, self._used, [self._per_sample] * len(self._used))
        # Otherwise equal devices would change places, as often as one has a sample more.
        kept = self._shares if sum(self._shares) == n else shares
        if self._fullest(kept) - self._fullest(shares) > SAME * self._per_sample:
            kept = shares
        self._shares = kept
        sizes = [0] * self._k
        for replicas, share in zip(self._replicas, kept, strict=True):
            for k, size in zip(replicas, even(share, len(replicas)), strict=True):
                sizes[k] = size
        return tuple(sizes)

    def learn(self, step: StepUsage) -> None:
        """Takes in a training step: each device's samples, its bytes before it and at its peak."""
        if not any(step.peak_bytes):
            if not self._has_warned:
                log.warning(
                    "split='memory': CPU replicas share one memory, so there is nothing to learn, "
                    "and every batch is split evenly. Use split='even' on the CPU."
                )
            self._has_warned = True
            return
        self._steps.append(step)
        heaviest = max(sum(step.peak_bytes) for step in self._steps)
        heavy = [s for s in self._steps if sum(s.peak_bytes) >= (1 - SAME) * heaviest][-1]
        roots = [replicas[0] for replicas in self._replicas]
        samples = [sum(heavy.sizes[k] for k in replicas) for replicas in self._replicas]
        self._per_sample = max(
            1.0,
            min(
                (heavy.peak_bytes[k] - heavy.start_bytes[k]) / n
                for k, n in zip(roots, samples, strict=True)
                if n
            ),
        )
        capacities = self._capacities()
        self._used = [
            heavy.peak_bytes[k] - self._per_sample * n - capacities[k]
            for k, n in zip(roots, samples, strict=True)
        ]

    def _fullest(self, shares: Sizes) -> float:
        """How little memory the fullest device has left, negated."""
        return max(used + self._per_sample * n for used, n in zip(self._used, shares, strict=True))
