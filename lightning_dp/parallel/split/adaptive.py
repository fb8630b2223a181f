"""split="adaptive": what a sample costs on every device, learnt from the times of steps."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeAlias

from lightning_dp.parallel.split.arithmetic import Caps, Sizes, minimax
from lightning_dp.parallel.split.usage import StepUsage

MIN_GAIN = 0.01
"""Share of a step's time that another split has to gain."""

NOISE_FACTOR = 3
"""How many times the noise of the measured times another split has to gain."""

CHANGED = 0.15
"""Relative error of a predicted time from which a device may have changed its speed."""

MEMORY = 8
"""Latest steps of each device that are kept."""

WARM_UP = 1
"""First steps that are not used: they build caches."""

COOLDOWN = 2
"""Steps after a change of the split until the next one. Of their times the shorter one counts."""

PROBE_EVERY = 50
"""Steps after which devices without samples get some, to see whether they are still as slow."""

PROBE = 2
"""Samples of such a device: batch norm takes no shard of one."""

Line: TypeAlias = tuple[float, float]
"""Seconds of a step on one device: `(fixed, per_sample)`."""

_solve = lru_cache(maxsize=64)(minimax)  # most steps pose the same problem


class DeviceTimes:
    """The latest steps of one device, and the line through their times."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, float]] = []  # samples, seconds
        self.line: Line | None = None  # None before the first step
        self.is_in_doubt = False  # the latest step contradicts the line; the next one decides

    def add(self, samples: int, seconds: float) -> None:
        """Adds a step. One that contradicts the line, and its like, replace all before them."""
        was_in_doubt, latest = self.is_in_doubt, [*self.steps[-1:], (samples, seconds)]
        self.is_in_doubt = bool(self.steps) and self._contradicts(samples, seconds)
        self.steps = [*self.steps[1 - MEMORY :], (samples, seconds)]
        if was_in_doubt and not _differ(*(seconds / n for n, seconds in latest)):
            self.steps, self.is_in_doubt = latest, False
        self.fit()

    def fit(self) -> None:
        """Fits the line: through the smallest and the largest size, else through 0 and the latest.

        Two sizes have to be far apart for their times to differ by more than noise.
        """
        if self.steps:
            latest = self.steps[-1][0]
            self.line = self._through_two_sizes() or (0.0, self._shortest(latest) / latest)

    def seconds(self, samples: int) -> float:
        """What a step with so many samples takes; 0 before the first step."""
        return self.line[0] + self.line[1] * samples if self.line and samples else 0.0

    def noise(self, samples: int) -> float:
        """How far times of one size scatter above their shortest, relative to it."""
        times = [seconds for n, seconds in self.steps if n == samples]
        return statistics.median(times) / min(times) - 1 if times else 0.0

    def _contradicts(self, samples: int, seconds: float) -> bool:
        """Whether a step differs from the line; one through a size far from it predicts nothing."""
        is_near = not _are_far(*sorted((samples, self.steps[-1][0])))
        can_predict = is_near or self._through_two_sizes() is not None
        return can_predict and _differ(seconds, self.seconds(samples))

    def _through_two_sizes(self) -> Line | None:
        low, high = min(n for n, _ in self.steps), max(n for n, _ in self.steps)
        if not _are_far(low, high):
            return None
        slope = (self._shortest(high) - self._shortest(low)) / (high - low)
        fixed = self._shortest(low) - slope * low
        return (fixed, slope) if slope > 0 and fixed >= 0 else None

    def _shortest(self, samples: int) -> float:
        """The shorter one of the latest times of a size: noise only adds time."""
        return min([seconds for n, seconds in self.steps if n == samples][-COOLDOWN:])


def _differ(seconds: float, expected: float) -> bool:
    return abs(seconds - expected) > CHANGED * expected


def _are_far(low: int, high: int) -> bool:
    return high - low >= max(2, high // 4)


class Adaptive:
    """A split that follows the devices' speeds, so that all end at the same time.

    It begins even, or with shares in proportion to given weights. Every few steps it solves
    `minimax` for the devices' lines, and takes that split if the slowest device gains 1 % or more,
    and more than the times scatter.

    Example:
        >>> split = Adaptive(2)
        >>> for _ in range(8):
        ...     a, b = split(12)
        ...     split.learn(StepUsage((a, b), (a * 0.1, b * 0.2)))
        >>> split(12)
        (8, 4)
    """

    def __init__(self, k: int, weights: Sequence[float] | None = None) -> None:
        self._k = k
        self._first: list[Line] = [(0.0, 1 / weight) for weight in weights or [1.0] * k]
        self._lines: list[Line] | None = None  # None for the first split
        self._devices = [DeviceTimes() for _ in range(k)]
        self._caps: tuple[int | None, ...] = (None,) * k
        self._steps = 0
        self._next_decision = WARM_UP + COOLDOWN  # at this step
        self._noise = 0.0

    def __call__(self, n: int, caps: Caps | None = None) -> Sizes:
        """The sizes for a batch of n samples, none above its cap."""
        self._caps = (None,) * self._k if caps is None else tuple(caps)
        sizes = self._solved(n, self._lines or self._first)
        is_probe = self._steps % PROBE_EVERY == PROBE_EVERY - 1
        return self._with_probes(sizes) if is_probe and 0 in sizes else sizes

    @property
    def measured_lines(self) -> list[Line] | None:
        """The lines by the latest times; None until every device has worked."""
        lines = [device.line for device in self._devices if device.line is not None]
        return lines if len(lines) == self._k else None

    def on_fewer(self, n: int, others: int, caps: Caps | None = None) -> Sizes:
        """The sizes for the root and at most so many others: those that end an equal share first.

        If the caps leave no room there, all devices work.
        """
        lines = self._lines or self._first
        share = n / (others + 1)
        ranked = sorted(range(1, self._k), key=lambda k: lines[k][0] + lines[k][1] * share)
        limits = list(caps or [None] * self._k)
        for k in ranked[others:]:
            limits[k] = 0
        if sum(n if limit is None else min(n, limit) for limit in limits) < n:
            return self(n, caps)
        fixed, per_sample = zip(*lines, strict=True)
        return _solve(n, fixed, per_sample, tuple(limits))

    def seconds(self, sizes: Sizes) -> float:
        """What the slowest device takes with these sizes, by the latest times."""
        return max(device.seconds(n) for device, n in zip(self._devices, sizes, strict=True))

    def learn(self, step: StepUsage) -> None:
        """Takes in a training step."""
        self._steps += 1
        if self._steps <= WARM_UP:
            return
        for device, n, seconds in zip(self._devices, step.sizes, step.busy_seconds, strict=True):
            if n and seconds > 0:
                device.add(n, seconds)
        lines = self.measured_lines
        if self._steps < self._next_decision or lines is None:
            return
        if not any(device.is_in_doubt for device in self._devices):
            self._decide(step.sizes, lines)

    def state_dict(self) -> dict[str, Any]:
        """What has been learnt, in plain numbers."""
        return {
            "steps": [list(map(list, device.steps)) for device in self._devices],
            "lines": None if self._lines is None else list(map(list, self._lines)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues with what another one has learnt, unless it had another number of devices."""
        if len(state.get("steps", ())) != self._k:
            return
        for device, steps in zip(self._devices, state["steps"], strict=True):
            device.steps = [(int(n), float(seconds)) for n, seconds in steps]
            device.fit()
        lines = state["lines"]
        self._lines = None if lines is None else [(float(a), float(b)) for a, b in lines]

    def _solved(self, n: int, lines: list[Line]) -> Sizes:
        fixed, per_sample = zip(*lines, strict=True)
        return _solve(n, fixed, per_sample, self._caps)

    def _decide(self, sizes: Sizes, lines: list[Line]) -> None:
        """Takes the split for the latest lines if it gains enough over these sizes."""
        active = [k for k, n in enumerate(sizes) if n]
        ends = [self._devices[k].seconds(sizes[k]) for k in active]
        # Steps may agree by chance, so noise that has been seen is forgotten slowly.
        self._noise = max(0.95 * self._noise, *(self._devices[k].noise(sizes[k]) for k in active))
        worth = max(ends) * max(MIN_GAIN, NOISE_FACTOR * self._noise)
        if self._lines is not None:
            first = self.seconds(self._solved(sum(sizes), self._first))
            if first - max(ends) < NOISE_FACTOR * self._noise * first:
                self._lines = None  # what was gained over the first split was noise
                return
        # Another split gives one of them more, so it ends no earlier than the first of these.
        if max(ends) - min(ends) < worth and len(active) == self._k:
            return
        self._next_decision = self._steps + COOLDOWN
        if max(ends) - self.seconds(self._solved(sum(sizes), lines)) >= worth:
            self._lines = lines

    def _has_room(self, k: int, samples: int) -> bool:
        cap = self._caps[k]
        return cap is None or samples < cap

    def _with_probes(self, sizes: Sizes) -> Sizes:
        """A probe for each idle device that has room, of samples from the fullest devices."""
        probing = list(sizes)
        for k, size in enumerate(sizes):
            most = max(range(self._k), key=probing.__getitem__)
            if size == 0 and self._has_room(k, PROBE - 1) and probing[most] >= 2 * PROBE:
                probing[most] -= PROBE
                probing[k] = PROBE
        return tuple(probing)
