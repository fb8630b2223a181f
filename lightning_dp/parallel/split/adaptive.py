"""Adaptive splitting: what a sample costs on every device, learnt from the times of steps.

No tensor and no device in here: sizes and seconds in, sizes out.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from lightning_dp.parallel.split.arithmetic import Sizes, minimax
from lightning_dp.parallel.split.usage import Caps, StepUsage

REST = 0.01
"""Share of a step's time below which what another split would gain moves nothing."""

DIFFERENT = 0.15
"""Relative difference from what was expected of a step from which a device may have changed."""

COOLDOWN = 2
"""Steps after a change until the next decision. Noise only adds time: the shorter one counts."""

SIGNAL = 3
"""How many times the noise a gain has to be, to be taken for a difference of the devices."""

PATIENCE = 20
"""Steps in which a split gains no more than noise over the first one, which then comes back."""

WARM_UP = 1
"""First steps that do not count: they build caches."""

PROBE_EVERY = 50
"""Steps after which devices without samples get some, to see whether they are still as slow."""

PROBE = 2
"""Samples of such a device: batch norm takes no shard of one."""


_solve = lru_cache(maxsize=64)(minimax)  # most steps pose the same problem


class DeviceTime:
    """The times of one device's steps, as a line: seconds = fixed + per_sample * samples."""

    MEMORY = 8

    def __init__(self) -> None:
        self.steps: list[tuple[int, float]] = []  # another list after each step
        self._fitted: list[tuple[int, float]] | None = None
        self._line: tuple[float, float] | None = None
        self.is_in_doubt = False  # the latest step contradicts the line: the next one will tell

    def add(self, samples: int, seconds: float) -> None:
        """Notes a step.

        One that contradicts the line, and a next one that agrees with it, mean that the device
        has changed: what was before is forgotten.
        """
        expected = self.seconds(samples) if self._can_expect(samples) else None
        was_in_doubt, latest = self.is_in_doubt, self.steps[-1:]
        self.is_in_doubt = expected is not None and _differ(seconds, expected)
        self.steps = [*self.steps[1 - self.MEMORY :], (samples, seconds)]
        if was_in_doubt and not any(_differ(seconds / samples, s / n) for n, s in latest):
            self.steps, self.is_in_doubt = self.steps[-2:], False

    def line(self) -> tuple[float, float] | None:
        """`(fixed, per_sample)`; None before the first step.

        Through the smallest and the largest size, if they are far enough apart for their
        difference to be more than noise; else in proportion to the samples.
        """
        if self._fitted is not self.steps:
            self._fitted, self._line = self.steps, self._fit()
        return self._line

    def seconds(self, samples: int) -> float | None:
        """What a step with so many samples takes."""
        line = self.line()
        return None if line is None else line[0] + line[1] * samples

    def noise(self, samples: int) -> float:
        """How far times of one size scatter above their shortest, relative to it."""
        times = [seconds for n, seconds in self.steps if n == samples]
        return statistics.median(times) / min(times) - 1 if times else 0.0

    def _fit(self) -> tuple[float, float] | None:
        if not self.steps:
            return None
        known = self._through_two_sizes()
        if known is not None:
            return known
        latest = self.steps[-1][0]
        return 0.0, self._shortest(latest) / latest

    def _through_two_sizes(self) -> tuple[float, float] | None:
        low, high = min(n for n, _ in self.steps), max(n for n, _ in self.steps)
        if not _are_far(low, high):
            return None
        slope = (self._shortest(high) - self._shortest(low)) / (high - low)
        fixed = self._shortest(low) - slope * low
        return (fixed, slope) if slope > 0 and fixed >= 0 else None

    def _can_expect(self, samples: int) -> bool:
        """Whether a step with so many samples can contradict what is known.

        Times of one size do not tell what is fixed in them. What a size far from it takes is news
        then, and no change of the device.
        """
        if not self.steps:
            return False
        latest = self.steps[-1][0]
        return not _are_far(*sorted((samples, latest))) or self._through_two_sizes() is not None

    def _shortest(self, samples: int) -> float:
        """Of the latest steps with so many samples."""
        times = [seconds for n, seconds in self.steps if n == samples]
        return min(times[-COOLDOWN:])


def _differ(seconds: float, expected: float) -> bool:
    return abs(seconds - expected) > DIFFERENT * expected


def _are_far(low: int, high: int) -> bool:
    """Whether the times of two sizes differ by more than noise."""
    return high - low >= max(2, high // 4)


class Adaptive:
    """A split that follows the devices' speeds, so that all end at the same time.

    It begins even, or with shares in proportion to given weights. Every few steps it solves
    `minimax` for what it has learnt of each device, and takes that if it makes the slowest one
    faster by 1 % or more. A gain that could be noise, since the times of one device differ as much
    among each other, moves nothing.

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
        # Lines by which the first split is made.
        self._first = [(0.0, 1 / weight) for weight in weights or [1.0] * k]
        self._devices = [DeviceTime() for _ in range(k)]
        self._caps: tuple[int | None, ...] = (None,) * k
        self._lines: list[tuple[float, float]] | None = None
        self._rest = WARM_UP + COOLDOWN
        self._steps = 0
        self._noise = 0.0
        self._doubts = 0

    def __call__(self, n: int, caps: Caps | None = None) -> Sizes:
        """The sizes for a batch of n samples, none above its cap."""
        self._caps = (None,) * self._k if caps is None else tuple(caps)
        sizes = self._solved(n, self.lines)
        is_probe = self._steps % PROBE_EVERY == PROBE_EVERY - 1
        return self._with_probes(sizes) if is_probe and 0 in sizes else sizes

    @property
    def lines(self) -> list[tuple[float, float]]:
        """Of each device `(fixed, per_sample)`, by which batches are split."""
        return self._lines or self._first

    @property
    def measured_lines(self) -> list[tuple[float, float]] | None:
        """What is known by now of what a sample takes on each device; None until all is."""
        lines = [device.line() for device in self._devices]
        known = [line for line in lines if line is not None]
        return known if len(known) == self._k else None

    def learn(self, step: StepUsage) -> None:
        """Takes in a step: what each device had, and how long it took."""
        self._steps += 1
        self._rest -= 1
        if self._steps <= WARM_UP:
            return
        work = zip(self._devices, step.sizes, step.busy_seconds, strict=True)
        for device, samples, spent in work:
            if samples and spent > 0:
                device.add(samples, spent)
        self._doubt(step.sizes)
        is_known = all(device.steps and not device.is_in_doubt for device in self._devices)
        if self._rest <= 0 and is_known:
            self._decide(step.sizes)

    def state_dict(self) -> dict[str, Any]:
        """What has been learnt, in plain numbers."""
        return {
            "steps": [list(map(list, device.steps)) for device in self._devices],
            "lines": None if self._lines is None else list(map(list, self._lines)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where another left off; with another number of devices it begins anew."""
        if len(state.get("steps", ())) != len(self._devices):
            return
        for device, steps in zip(self._devices, state["steps"], strict=True):
            device.steps = [(int(n), float(seconds)) for n, seconds in steps]
        lines = state["lines"]
        self._lines = None if lines is None else [(float(a), float(b)) for a, b in lines]

    def _solved(self, n: int, lines: list[tuple[float, float]]) -> Sizes:
        fixed, per_sample = zip(*lines, strict=True)
        return _solve(n, fixed, per_sample, self._caps)

    def _decide(self, sizes: Sizes) -> None:
        """Rests, or solves anew, by the times of a batch of these sizes."""
        ends = {k: self._end(k, size) for k, size in enumerate(sizes) if size}
        slowest = max(ends.values())
        # A few steps may agree by chance: noise that has been seen is forgotten slowly.
        self._noise = max(0.95 * self._noise, *(self._devices[k].noise(sizes[k]) for k in ends))
        worth = slowest * max(REST, SIGNAL * self._noise)
        # Another split gives one of them more: no split ends before the first that has room.
        first = min((ends[k] for k in ends if self._has_room(k, sizes[k])), default=slowest)
        if slowest - first < worth:
            return
        self._rest = COOLDOWN
        lines = [device.line() or (0.0, 0.0) for device in self._devices]
        if slowest - self._last_end(self._solved(sum(sizes), lines)) >= worth:
            self._lines, self._doubts = lines, 0

    def _doubt(self, sizes: Sizes) -> None:
        """Goes back to the first if for long nothing but noise has spoken for another split."""
        if self._lines is None or self._noise < REST:
            self._doubts = 0
            return
        first = self._last_end(self._solved(sum(sizes), self._first))
        is_worth = first - self._last_end(sizes) >= SIGNAL * self._noise * first
        self._doubts = 0 if is_worth else self._doubts + 1
        if self._doubts >= PATIENCE:
            self._lines, self._doubts = None, 0

    def _end(self, k: int, samples: int) -> float:
        return self._devices[k].seconds(samples) or 0.0

    def _last_end(self, sizes: Sizes) -> float:
        return max([self._end(k, size) for k, size in enumerate(sizes) if size], default=0.0)

    def _has_room(self, k: int, samples: int) -> bool:
        cap = self._caps[k]
        return cap is None or samples < cap

    def _with_probes(self, sizes: Sizes) -> Sizes:
        """A probe for each idle device that has room, of samples from those that have most."""
        probing = list(sizes)
        for k, size in enumerate(sizes):
            most = max(range(len(sizes)), key=probing.__getitem__)
            if size == 0 and self._has_room(k, PROBE - 1) and probing[most] >= 2 * PROBE:
                probing[most] -= PROBE
                probing[k] = PROBE
        return tuple(probing)
