"""The largest batch that fits: a straight line says about where, steps there prove it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning_dp.app.estimate.bench import Bench, Run
from lightning_dp.parallel.split import even, weighted

EVEN: dict[str, Any] = {"split": "even", "weights": None, "sample_cost": None}
"""Options of the strategy, whatever the experiment has."""

GROWTH = 4
"""How far the largest batch may be from one that has run, for a straight line to reach it."""


STRAIGHT = 0.01
"""Relative difference from a peak up to which a line is believed."""


@dataclass(frozen=True)
class Largest:
    """The largest batch of a split.

    Args:
        samples: of all devices; 0 if not even one fits.
        run: with so many; None if nobody has taken it.
        is_proven: whether it has run, and one sample more has not.
    """

    samples: int
    run: Run | None
    is_proven: bool


@dataclass(frozen=True)
class Split:
    """A split that was tried: its name, its options, and what it has shown."""

    name: str
    options: Mapping[str, Any]
    run: Run
    largest: Largest | None = None


class Lines:
    """A device's peak is `fixed + per_sample * samples`: drawn through the latest two trainings."""

    def __init__(self) -> None:
        self._runs: list[Run] = []

    def note(self, run: Run) -> None:
        """A training in which nobody ran out."""
        self._runs = [*self._runs, run][-2:]

    def of_devices(self) -> list[tuple[float, float]]:
        """Of each device what is fixed, and what a sample takes: at least a byte."""
        lines = []
        for a, b in zip(self._runs[0].uses, self._runs[-1].uses, strict=True):
            more = b.samples - a.samples
            slope = max(1.0, (b.peak - a.peak) / more if more else b.peak / max(1, b.samples))
            lines.append((b.peak - slope * b.samples, slope))
        return lines

    def peaks(self, sizes: Sequence[int]) -> list[float]:
        """What devices with so many samples would hold."""
        lines = zip(self.of_devices(), sizes, strict=True)
        return [fixed + slope * n for (fixed, slope), n in lines]

    def are_straight(self, expected: Sequence[float]) -> bool:
        """Whether the latest peaks are as expected, and for a good part by the samples."""
        of = zip(self.of_devices(), self._runs[-1].uses, expected, strict=True)
        return all(
            abs(use.peak - peak) <= STRAIGHT * use.peak and 2 * slope * use.samples > use.peak
            for (_, slope), use, peak in of
        )

    def most(self, sizes_of: Callable[[int], Sequence[int]], limit: int) -> int:
        """The largest batch whose shares fit; 0 if none does."""
        low, high = 0, 1
        while max(self.peaks(sizes_of(high))) <= limit:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            fits = max(self.peaks(sizes_of(middle))) <= limit
            low, high = (middle, high) if fits else (low, middle)
        return low

    def together(self, limit: int) -> int:
        """The largest batch of which each device takes as many samples as fit there."""
        return sum(max(0, int((limit - fixed) / slope)) for fixed, slope in self.of_devices())


class Clock:
    """So many seconds are left for proofs."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def has(self, seconds: float) -> bool:
        """Whether there are so many."""
        return time.monotonic() + seconds < self._end

    @property
    def is_over(self) -> bool:
        """Whether there are none."""
        return not self.has(0.0)


def largest(attempt: Callable[[int], Run | None], guess: int, clock: Clock) -> Largest:
    """Searches from a guess, in steps that double, then halves what is left between.

    Args:
        attempt: a training with so many samples; None where it does not fit.
        guess: close to the answer, at best.
        clock: when it ends without a proof.
    """
    low, high, run = 0, None, None
    n, step, was_up = max(1, guess), 1, None
    while high is None or high - low > 1:
        if clock.is_over:
            return Largest(low or guess, run, is_proven=False)
        got = attempt(n)
        if got is None:
            high = n
        else:
            low, run = n, got
        step = 2 * step if was_up is (got is not None) else 1
        was_up = got is not None
        n = low + step if was_up or high is None else high - step
        if high is not None and not low < n < high:
            n = (low + high) // 2
    return Largest(low, run, is_proven=True)


class Search:
    """The largest batch of each split within a limit."""

    def __init__(self, bench: Bench, limit: int, clock: Clock) -> None:
        self._bench, self._limit, self._clock = bench, limit, clock
        self._k = len(bench.devices)
        self._seconds = 0.0  # of a sample
        self._lines = Lines()
        # Of real devices no limit can be set to the byte.
        simulated = bench.devices[0].type == "sim"
        self._can_prove = simulated and self._k * limit <= _room_of_host()

    def approach(self, n: int, run: Run) -> None:
        """Takes steps with larger and larger batches, or smaller ones, until lines are right."""
        self._lines.note(run)
        n *= 2
        while not self._clock.is_over:
            expected = self._lines.peaks(even(n, self._k))
            if sum(expected) > _room_of_host():
                return
            began = time.monotonic()
            run = taken(self._bench, n, EVEN)
            self._seconds = (time.monotonic() - began) / n
            self._lines.note(run)
            edge = max(1, self._lines.most(partial(even, k=self._k), self._limit))
            if n / GROWTH <= edge <= GROWTH * n or self._lines.are_straight(expected):
                return
            n = min(GROWTH * n, edge)

    def largest(self, split: Split) -> Largest:
        """Of this split; proven where simulated devices with this limit can be had."""
        if split.name == "memory":
            guess = self._lines.together(self._limit)
        elif split.name == "weights":
            shares = partial(weighted, weights=split.options["weights"])
            guess = self._lines.most(shares, self._limit)
        else:
            guess = self._lines.most(partial(even, k=self._k), self._limit)
        if not self._can_prove or not self._clock.has(guess * self._seconds):
            return Largest(guess, None, is_proven=False)
        return largest(partial(self._attempt, split), guess, self._clock)

    def _attempt(self, split: Split, n: int) -> Run | None:
        run = self._bench.run(n, split.options, self._limit)
        keeps_shares = split.name != "memory"
        return None if run is None or (keeps_shares and run.ran_out) else run


def _room_of_host() -> float:
    """Bytes that simulated devices can take: half of what this machine has."""
    if not hasattr(os, "sysconf"):
        return 2.0**33
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2


def taken(bench: Bench, n: int, own: Mapping[str, Any]) -> Run:
    """A training without a limit."""
    run = bench.run(n, own)
    if run is None:
        raise ValueError(
            f"--batch: expected samples that these devices have room for, got {n}. Give fewer, or "
            "take simulated devices: --devices 4."
        )
    return run
