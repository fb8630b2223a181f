"""Splits that learn from the training steps: by the devices' times, or by their memory."""

from __future__ import annotations

import logging
import statistics
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from lightning_dp.parallel.split.arithmetic import Caps, Sizes, minimax

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


class LearningSplit(ABC):
    """A split that learns from the training steps of one fit."""

    @abstractmethod
    def __call__(self, n: int, caps: Caps | None = None) -> Sizes:
        """The sizes for a batch of n samples, none above its cap."""

    @abstractmethod
    def learn(self, step: StepUsage) -> None:
        """Takes in a training step."""


# split="adaptive": by time

MIN_GAIN = 0.01  # share of a step's time that another split has to gain
NOISE_FACTOR = 3  # how many times the noise of the measured times another split has to gain
CHANGED = 0.15  # relative error of a predicted time from which a device may have changed
KEPT_TIMES = 8  # latest steps of each device that are kept
WARM_UP = 1  # first steps that are not used: they build caches
COOLDOWN = 2  # steps after a change of the split until the next one; the shorter time counts
PROBE_EVERY = 50  # steps after which idle devices get some samples: they may be faster by now
PROBE = 2  # samples of such a device: batch norm takes no shard of one


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
        self.steps = [*self.steps[1 - KEPT_TIMES :], (samples, seconds)]
        if was_in_doubt and not _differ(*(seconds / n for n, seconds in latest)):
            self.steps, self.is_in_doubt = latest, False
        # Two sizes have to be far apart for their times to differ by more than noise.
        self.line = self._through_two_sizes() or (0.0, self._shortest(samples) / samples)

    def seconds(self, samples: int) -> float:
        """The predicted time of a step with this many samples; 0 before the first step."""
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


class Adaptive(LearningSplit):
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
        """The sizes for the root and the `others` devices that end an equal share first.

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

    def _with_probes(self, sizes: Sizes) -> Sizes:
        """A probe for each idle device that has room, of samples from the fullest devices."""
        probing = list(sizes)
        for k, (size, cap) in enumerate(zip(sizes, self._caps, strict=True)):
            most = max(range(self._k), key=probing.__getitem__)
            if size == 0 and (cap is None or cap >= PROBE) and probing[most] >= 2 * PROBE:
                probing[most] -= PROBE
                probing[k] = PROBE
        return tuple(probing)


# split="memory": by bytes

KEPT_STEPS = 16  # latest steps that are kept: the split is for the heaviest of their batches
SAME = 0.02  # relative difference below which steps are equally heavy, and devices equally full


class _DeviceStep(NamedTuple):
    """What one device did in a step."""

    samples: int
    start: int  # bytes in use
    peak: int


class Memory(LearningSplit):
    """A split that leaves equally much memory free on every device.

    A device's peak is `fixed + per_sample * samples`. Fixed are weights, gradients, the optimizer's
    state and gathered outputs: usually more on the root. What a sample takes is the same
    everywhere, since the module is; all that a step adds is an upper bound of it, so each split
    moves too few samples rather than too many. The first step is even. `minimax` of peak minus
    capacity gives equal free memory, so a smaller or fuller device gets less. Replicas whose
    `places` are the same number share one device's memory.

    Example:
        >>> split = Memory([0, 1], lambda: [1000, 1000])
        >>> split(20)
        (10, 10)
        >>> split.learn(StepUsage((10, 10), (1, 1), 1, (520, 400), start_bytes=(270, 150)))
        >>> split(20)  # at most 25 bytes per sample
        (8, 12)
    """

    def __init__(self, places: Sequence[int], capacities: Capacities) -> None:
        self._replicas = [
            [k for k, place in enumerate(places) if place == device]
            for device in sorted(set(places))
        ]
        self._k = len(places)
        self._capacities = capacities
        self._steps: deque[list[_DeviceStep]] = deque(maxlen=KEPT_STEPS)
        self._per_sample = 1.0
        self._fixed: list[float] = []  # of each device; empty until a step was measured
        self._free: list[float] = []  # capacity - fixed
        self._has_warned = False

    def __call__(self, n: int, caps: Caps | None = None) -> Sizes:
        """The sizes for a batch of n samples, none above its cap."""
        limits = [n if cap is None else min(n, cap) for cap in caps or [None] * self._k]
        if not self._free:
            return _equal(n, limits)
        rooms = [sum(limits[k] for k in replicas) for replicas in self._replicas]
        used = [-free for free in self._free]
        shares = minimax(n, used, [self._per_sample] * len(used), rooms)
        latest = tuple(step.samples for step in self._steps[-1])
        fits = sum(latest) == n and all(map(int.__le__, latest, rooms))
        if fits and not self._is_better(shares, latest):
            shares = latest
        sizes = [0] * self._k
        for replicas, share in zip(self._replicas, shares, strict=True):
            for k, size in zip(replicas, _equal(share, [limits[k] for k in replicas]), strict=True):
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
        devices = [
            _DeviceStep(
                sum(step.sizes[k] for k in ks), step.start_bytes[ks[0]], step.peak_bytes[ks[0]]
            )
            for ks in self._replicas
        ]
        self._steps.append(devices)
        if self._free and self._is_balanced(devices):
            return
        totals = [sum(device.peak for device in step) for step in self._steps]
        least = (1 - SAME) * max(totals)
        heavy = [s for s, total in zip(self._steps, totals, strict=True) if total >= least][::-1]
        added = min((d.peak - d.start) / d.samples for d in heavy[0] if d.samples)
        self._per_sample = max(1.0, added)
        self._fixed = []
        for i in range(len(devices)):
            latest = next((s[i] for s in heavy if s[i].samples), heavy[0][i])
            self._fixed.append(latest.peak - self._per_sample * latest.samples)
        capacities = self._capacities()
        self._free = [
            capacities[replicas[0]] - fixed
            for replicas, fixed in zip(self._replicas, self._fixed, strict=True)
        ]

    def _is_better(self, shares: Sizes, latest: Sizes) -> bool:
        """Whether other shares leave the fullest device less full, or all more even.

        Otherwise equal devices would change places, as often as one has a sample more.
        """
        after, before = (
            [free - self._per_sample * n for free, n in zip(self._free, sizes, strict=True)]
            for sizes in (shares, latest)
        )
        least, spread = SAME * self._per_sample, max(before) - min(before)
        return min(after) - min(before) > least or spread - (max(after) - min(after)) > least

    def _is_balanced(self, devices: list[_DeviceStep]) -> bool:
        """Whether no device had more memory left at its peak than those that worked."""
        columns = zip(self._free, self._fixed, devices, strict=True)
        left = [free + fixed - step.peak for free, fixed, step in columns]
        working = [rest for rest, step in zip(left, devices, strict=True) if step.samples]
        return max(left) - min(working) <= SAME * max(step.peak for step in devices)


def _equal(n: int, caps: Sequence[int]) -> Sizes:
    return minimax(n, [0.0] * len(caps), [1.0] * len(caps), caps)
