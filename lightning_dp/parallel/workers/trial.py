"""Trials: by which way a kind of work is done sooner, in threads or in order."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterator

from lightning_dp.parallel.links import Stretch


class Trial:
    """Decides between threads and in-order runs by the median of their recent times.

    Both take turns at first, several pieces of work in a row: the first one after a change of the
    way starts threads and fills caches, and is not counted. Then the faster runs, and now and then
    the other once more: a machine may be busy during the first steps, or become so later. What
    counts is when the devices are through. Nobody waits for that: a piece of work counts once they
    are.
    """

    IN_A_ROW = 4  # pieces of work by one way at first
    TURNS = 2  # of each way at first
    KEPT = 6  # times of each way that the medians are taken of
    PROBE = 2  # pieces of work in a row, of which the second one counts
    PROBE_EVERY = 64  # pieces of work, or later:
    PROBE_COST = 0.01  # of all time, at most ...
    PROBE_LATEST = 1024  # ... unless that is more pieces than this

    def __init__(self) -> None:
        self.threads = True  # how the present piece of work is to run
        self.is_measured = False  # whether its time is to be added
        self.count = 0  # pieces of work so far, and the rest
        self.rest: Iterator[int] = iter(())  # further ones: nothing to decide, nothing to measure
        self._in_a_row = 0  # of these by the present way
        self._interval = self._left = 0  # pieces from one probe to the next, and to its end
        self._seconds = {way: deque[float](maxlen=self.KEPT) for way in (True, False)}
        self._first = dict.fromkeys((True, False), 0.0)  # of the latest piece after a change
        self._pieces: deque[tuple[bool, bool, list[Stretch]]] = deque(maxlen=2 * self.KEPT)

    def begin(self) -> None:
        """Starts another piece of work."""
        if next(self.rest, None) is not None:
            return
        self._read()
        way = self._next()
        self._in_a_row = self._in_a_row + 1 if self.count and way == self.threads else 1
        self.count += 1
        self.threads = way
        # The probe, and what runs beside it.
        self.is_measured = self._left < self.PROBE or self._interval - self._left < self.KEPT
        if self.is_measured:
            self._pieces.append((way, self._in_a_row == 1, []))
        elif not self._pieces:
            rest, self._left = self._left - self.PROBE, self.PROBE
            self.count, self._in_a_row = self.count + rest, self._in_a_row + rest
            self.rest = iter(range(rest))

    @property
    def has_ended(self) -> bool:
        """Whether both ways are known; from here on the slower one is only a probe."""
        return self.count > 2 * self.TURNS * self.IN_A_ROW and all(self._seconds.values())

    @property
    def medians(self) -> dict[bool, float]:
        """Seconds of a piece of work in threads (True) and in order, as far as they are known."""
        return {way: statistics.median(times) for way, times in self._seconds.items() if times}

    def add(self, stretch: Stretch) -> None:
        """Adds to the time of the present piece of work, if it is measured."""
        self._pieces[-1][-1].append(stretch)

    def _next(self) -> bool:
        """Whether the next piece of work is to run in threads."""
        in_threads, in_order = self._seconds.values()
        turn = self.count // self.IN_A_ROW
        if turn < 2 * self.TURNS or not in_threads or not in_order:
            return turn % 2 == 0
        seconds = self.medians
        faster = seconds[True] <= seconds[False]
        self._left -= 1
        if self._left < 0:
            self._interval = self._left = self._probe_after(faster, seconds[faster])
        return faster != (self._left < self.PROBE)

    def _probe_after(self, faster: bool, seconds: float) -> int:
        """How many pieces of work pass until a probe has ended, and take so many seconds each.

        By what the latest one took, and the way back: if it was short, others follow soon.
        """
        taken = [self._first[not faster], self._seconds[not faster][-1], self._first[faster]]
        more = sum([max(0.0, each - seconds) for each in taken])
        if more >= self.PROBE_LATEST * self.PROBE_COST * seconds:
            return self.PROBE_LATEST
        return max(self.PROBE_EVERY, math.ceil(more / (self.PROBE_COST * seconds)))

    def _read(self) -> None:
        """Takes the times of the pieces that the devices are through with."""
        while self._pieces and all([stretch.is_over() for stretch in self._pieces[0][-1]]):
            way, is_first, stretches = self._pieces.popleft()
            seconds = sum([stretch.seconds for stretch in stretches])
            if is_first:
                self._first[way] = seconds
            elif stretches:  # none: it has never run
                self._seconds[way].append(seconds)
