"""What each device does in training: samples, seconds of work, memory."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain

import torch

from lightning_dp.parallel.apply import Task
from lightning_dp.parallel.comm import DeviceTimer
from lightning_dp.parallel.devices import allocated_memory, peak_memory, reset_peak_memory
from lightning_dp.parallel.split import Sizes, StepUsage

KEPT_STEPS = 1024
"""Measured steps that are kept until `take`; older ones are dropped."""


@dataclass
class DeviceUsage:
    """What one device has done in training so far.

    Attributes:
        device: the device.
        name: the replica's name, which is the device's unless several share it.
        samples: training samples it was given; in forward mode the rows of all spread calls.
        busy_seconds: time spent in its forward and backward, as its worker saw it; in forward
            mode in its forward. Accelerators compute asynchronously: there it is the time that
            issuing the forward took.
        peak_bytes: the most memory that was in use on the device since its statistics were reset
            last, by whomever; 0 where devices do not count it, as the CPU.
    """

    device: torch.device
    name: str
    samples: int = 0
    busy_seconds: float = 0.0
    peak_bytes: int = 0


class UsageMeter:
    """Measures every training step, once it `is_watched`.

    On accelerators, a replica's seconds are those between events at both ends of its forward and of
    its backward; on the CPU those that its worker spent in its calls. Each measured step resets the
    devices' peaks of memory.

    Args:
        devices: of the replicas.
        learn: gets each step, once all devices have finished it.
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        learn: Callable[[StepUsage], None] | None = None,
    ) -> None:
        self._devices, self._learn, self.is_watched = list(devices), learn, learn is not None
        self._peaks = [0] * len(self._devices)  # before the latest reset
        self._running: _Step | None = None
        self._stopped: deque[_Step] = deque(maxlen=KEPT_STEPS)  # devices may be still at these
        self._untaken: deque[StepUsage] = deque(maxlen=KEPT_STEPS)

    # One step; where it is not watched, nothing happens

    def start(self, sizes: Sizes, tasks: Sequence[Task] = ()) -> None:
        """Starts to measure a step with these samples, of which these are the forward's calls."""
        if self.is_watched:
            self._read_memory()
            self._peaks = self.peaks()
            for device in set(self._devices):
                reset_peak_memory(device)
            self._running = step = _Step(self._devices, sizes)
            for task in tasks if step.spans else ():
                task.spans = step.spans[task.replica]

    @contextmanager
    def working(self, replicas: Sequence[int]) -> Iterator[None]:
        """Counts what these replicas' devices do meanwhile as the step's work."""
        spans = [] if self._running is None else self._running.spans
        started = [(spans[k], DeviceTimer([self._devices[k]])) for k in replicas] if spans else []
        try:
            yield
        finally:
            for of_device, span in started:
                span.end()
                of_device.append(span)

    def add_seconds(self, seconds: Mapping[int, float]) -> None:
        """Adds the seconds that workers spent."""
        if self._running is not None:
            for k, spent in seconds.items():
                self._running.seconds[k] += spent

    def stop(self) -> None:
        """Ends a step: all its work has been issued."""
        step, self._running = self._running, None
        if step is not None:
            step.wall = time.perf_counter() - step.began
            self._stopped.append(step)

    # What was measured

    def update(self) -> None:
        """Takes in the steps that all devices have finished by now."""
        self._read_memory()
        while self._stopped and self._stopped[0].is_over():
            step = self._stopped.popleft().usage()
            self._untaken.append(step)
            if self._learn is not None:
                self._learn(step)

    def take(self, *, wait: bool = False) -> list[StepUsage]:
        """The steps that all devices have finished, in order, each once; `wait`: for all others."""
        for step in self._stopped if wait else ():
            step.wait()
        self.update()
        taken = list(self._untaken)
        self._untaken.clear()
        return taken

    def peaks(self) -> list[int]:
        """The devices' peaks of memory, of all steps."""
        return list(map(max, self._peaks, map(peak_memory, self._devices)))

    def _read_memory(self) -> None:
        """Reads the peaks of the latest step; later allocations belong to the next one."""
        if self._stopped and not self._stopped[-1].peak_bytes:
            self._stopped[-1].peak_bytes = tuple(map(peak_memory, self._devices))


class _Step:
    """One step that is being measured."""

    def __init__(self, devices: list[torch.device], sizes: Sizes) -> None:
        self.seconds = [0.0] * len(devices)  # of the workers
        self.wall = 0.0
        self.peak_bytes: tuple[int, ...] = ()
        self._sizes, self._start_bytes = sizes, tuple(map(allocated_memory, devices))
        self._on_cpu = all(device.type == "cpu" for device in devices)
        # Replicas that share a device share its streams, whose events cannot tell them apart.
        are_apart = len(set(devices)) == len(devices)
        has_events = are_apart and all(device.type != "cpu" for device in devices)
        self.spans: list[list[DeviceTimer]] = [[] for _ in devices] if has_events else []
        self.began = time.perf_counter()

    def is_over(self) -> bool:
        return all([span.is_over() for span in chain(*self.spans)])

    def wait(self) -> None:
        for span in chain(*self.spans):
            span.wait()

    def usage(self) -> StepUsage:
        busy = self.seconds
        if self.spans:
            busy = [sum([span.seconds for span in of_device]) for of_device in self.spans]
        # Only on the CPU do workers see the whole step: elsewhere autograd runs the backward.
        total = max(self.wall, *busy) if self._on_cpu else max(busy)
        memory = self.peak_bytes, self._start_bytes
        return StepUsage(self._sizes, tuple(busy), total, *memory)
