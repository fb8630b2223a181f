"""One training step measured: each device's work, its time and its memory."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from operator import sub

import torch

from lightning_dp.parallel.contexts import Lasting
from lightning_dp.parallel.devices import (
    allocated_memory,
    busy_clock,
    peak_memory,
    reset_peak_memory,
)
from lightning_dp.parallel.links import Span
from lightning_dp.parallel.split import Sizes, StepUsage
from lightning_dp.parallel.workers import Task

_UNREAD = 16
"""Steps that may wait for a GPU to be through with them; older ones are dropped."""

_UNTAKEN = 1024
"""Measured steps that are kept until somebody takes them; older ones are dropped."""


class PeakMemory:
    """The most bytes in use on each device: since the last restart, and since ever.

    The devices count, for the whole program: nothing is reset unless somebody asks for windows.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = list(devices)
        self._before = [0] * len(self._devices)

    def restart(self) -> None:
        """A new window begins."""
        self._before = self.overall()
        self.forget()

    def forget(self) -> None:
        """What was in use since the last restart does not count."""
        for device in set(self._devices):
            reset_peak_memory(device)

    def window(self) -> list[int]:
        """Per replica the peak of its device since the last restart; 0 where none counts."""
        return list(map(peak_memory, self._devices))

    def overall(self) -> list[int]:
        """Per replica the peak of its device since others have reset it."""
        return list(map(max, self._before, self.window()))


class StepMeter:
    """Measures the replicas' work from `start` to `stop`, and the memory until it is read.

    A device that counts its own work (simulated ones with a speed) is believed. Accelerators
    compute asynchronously: events at both ends of a replica's forward and of its backward tell when
    each is through with it. In between a device waits for the others, which is no work. On the
    CPU it is the time that the workers spent in the replica's calls. Every step restarts the
    memory's peaks.
    """

    def __init__(self, devices: Sequence[torch.device], memory: PeakMemory) -> None:
        self._devices = list(devices)
        # Replicas on one device share its clock, which then cannot tell them apart.
        self._have_clocks = len(set(devices)) == len(self._devices)
        self._memory = memory
        self._running: _Step | None = None
        self._stopped: deque[_Step] = deque(maxlen=_UNREAD)
        self._latest: StepUsage | None = None
        self._untaken: deque[StepUsage] = deque(maxlen=_UNTAKEN)

    def start(self, sizes: Sizes) -> None:
        """A step begins with so many samples on each device."""
        self._end_of_memory()
        self._memory.restart()
        self._running = _Step(self._devices, sizes, self._have_clocks)

    def is_by_counts(self) -> bool:
        """Whether devices have counted work of their own."""
        return self._have_clocks and any(map(busy_clock, self._devices))

    def follow(self, tasks: Sequence[Task]) -> None:
        """What devices do in these calls counts."""
        step = self._running
        if step is not None and step.spans:
            for task in tasks:
                task.spans = step.spans[task.replica]

    def working(self, replicas: Sequence[int]) -> AbstractContextManager[None]:
        """While it lasts, the devices of some replicas are at work for the step."""
        step = self._running
        if step is None or not step.spans:
            return nullcontext()
        return _Working([(self._devices[k], step.spans[k]) for k in replicas])

    def add(self, k: int, seconds: float) -> None:
        """A worker spent so many seconds in calls of replica k."""
        if self._running is not None:
            self._running.spent[k] += seconds

    def note(self, *, in_turns: bool) -> None:
        """How the running step's replicas ran."""
        if self._running is not None:
            self._running.in_turns = in_turns

    def stop(self) -> None:
        """The step's work has been handed to the devices."""
        step, self._running = self._running, None
        if step is not None:
            step.stop()
            self._stopped.append(step)

    def latest(self) -> StepUsage | None:
        """The latest step that all devices are through with; None before the first one."""
        self._end_of_memory()
        while self._stopped and self._stopped[0].is_over():
            self._latest = self._stopped.popleft().usage()
            self._untaken.append(self._latest)
        return self._latest

    def take(self, *, wait: bool = False) -> list[StepUsage]:
        """The steps that all devices are through with, in order, each once; or waits for all."""
        for step in self._stopped if wait else ():
            step.wait()
        self.latest()
        taken, self._untaken = list(self._untaken), deque(maxlen=_UNTAKEN)
        return taken

    def _end_of_memory(self) -> None:
        """What is in use from now on is no longer the stopped step's."""
        if self._stopped and not self._stopped[-1].peak_bytes:
            self._stopped[-1].peak_bytes = self._memory.window()


class _Working(Lasting):
    """Devices are at work, of which the spans of a step are to tell."""

    def __init__(self, devices: Sequence[tuple[torch.device, list[Span]]]) -> None:
        self._devices = devices
        self._running: list[tuple[Span, list[Span]]] = []

    def begin(self) -> None:
        """From here on."""
        for device, known in self._devices:
            self._running.append((Span(device), known))

    def end(self) -> None:
        """No longer."""
        while self._running:
            span, known = self._running.pop()
            span.end()
            known.append(span)


class _Step:
    """One step while it is measured."""

    def __init__(self, devices: list[torch.device], sizes: Sizes, have_clocks: bool) -> None:
        self.spent = [0.0] * len(devices)
        self.peak_bytes: list[int] = []
        self._sizes = sizes
        self._start_bytes = list(map(allocated_memory, devices))
        self._devices = devices if have_clocks else []
        self._clocks = list(map(busy_clock, self._devices))
        self._on_cpu = all(device.type == "cpu" for device in devices)
        has_spans = have_clocks and all(device.type != "cpu" for device in devices)
        self.spans: list[list[Span]] = [[] for _ in devices] if has_spans else []
        self._began = time.perf_counter()
        self._wall = 0.0
        self._counted: list[float] = []
        self.in_turns = False

    def stop(self) -> None:
        self._wall = time.perf_counter() - self._began
        self._counted = list(map(sub, map(busy_clock, self._devices), self._clocks))

    def is_over(self) -> bool:
        return all(span.is_over() for span in chain.from_iterable(self.spans))

    def wait(self) -> None:
        for span in chain.from_iterable(self.spans):
            span.wait()

    def usage(self) -> StepUsage:
        busy = self.spent
        if any(self._counted):
            busy = self._counted
        elif self.spans:
            busy = [sum(span.seconds for span in own) for own in self.spans]
        # Only on the CPU do the workers see all of a step: elsewhere its backward is not theirs.
        total = max(self._wall, *busy) if self._on_cpu else max(busy)
        peaks, before = tuple(self.peak_bytes), tuple(self._start_bytes)
        in_turns = self.in_turns and self._on_cpu and sum(map(bool, self._sizes)) > 1
        return StepUsage(self._sizes, tuple(busy), total, peaks, before, in_turns)
