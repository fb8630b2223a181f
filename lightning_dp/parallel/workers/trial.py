"""Trials: by which way a kind of work is done sooner, in threads or in order."""

from __future__ import annotations

import statistics
from collections import deque

from lightning_dp.parallel.links import Stretch


class Trial:
    """Decides between threads and in-order runs by the median of their recent times.

    Both take turns at first. Then the faster runs, and now and then the other once more: a machine
    may be busy during the first steps, or become so later. What counts is when the devices are
    through. Nobody waits for that: a piece of work counts once they are.
    """

    ROUNDS = 5  # of each at first, and what the medians are taken of
    PROBE_EVERY = 64  # pieces of work; at twice the time a probe costs under 2 %

    def __init__(self) -> None:
        self.threads = True  # how the present piece of work is to run
        self.is_measured = False  # whether its time is to be added
        self._count = -2  # the first piece of each way is not counted: it starts caches
        self._seconds = {way: deque[float](maxlen=self.ROUNDS) for way in (True, False)}
        self._pieces: deque[tuple[bool, list[Stretch]]] = deque(maxlen=2 * self.ROUNDS)

    def begin(self) -> None:
        """Starts another piece of work."""
        self._count += 1
        self._read()
        in_threads, in_order = self._seconds.values()
        if self._count < 2 * self.ROUNDS or not in_threads or not in_order:
            self.threads = self._count % 2 == 1
        else:
            is_probe = self._count % self.PROBE_EVERY == 0
            is_faster = statistics.median(in_threads) <= statistics.median(in_order)
            self.threads = is_faster != is_probe
        # The probe, and what runs beside it.
        is_near = self._count < 2 * self.ROUNDS or self._count % self.PROBE_EVERY < self.ROUNDS
        self.is_measured = self._count > 0 and (is_near or not in_threads or not in_order)
        if self.is_measured:
            self._pieces.append((self.threads, []))

    @property
    def has_ended(self) -> bool:
        """Whether both ways are known; from here on the slower one is only a probe."""
        return self._count >= 2 * self.ROUNDS and all(self._seconds.values())

    def add(self, stretch: Stretch) -> None:
        """Adds to the time of the present piece of work, if it is measured."""
        self._pieces[-1][1].append(stretch)

    def _read(self) -> None:
        """Takes the times of the pieces that the devices are through with."""
        while self._pieces and all([stretch.is_over() for stretch in self._pieces[0][1]]):
            way, stretches = self._pieces.popleft()
            if stretches:  # none: it has never run
                self._seconds[way].append(sum([stretch.seconds for stretch in stretches]))
