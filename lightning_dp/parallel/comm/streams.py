"""Current streams, copy streams and timers; `chain` says when copies wait for each other.

[Note: streams] Work on one stream is in order. Every thread has current streams of its own, at
first the default ones, so code that continues a caller's work in another thread makes the caller's
streams current there. The same code serves all accelerators, by `torch.accelerator`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal

import torch


def current_stream(device: torch.device) -> torch.Stream:
    """The calling thread's current stream on an accelerator."""
    return torch.accelerator.current_stream(device.index)  # ten times as fast as with the device


@cache
def copy_stream(device: torch.device, end: Literal["arriving", "leaving"]) -> torch.Stream:
    """The device's one stream for copies that arrive there, or for those that leave it.

    There are two because a link carries both directions at once: on a single stream a device in the
    middle of a chain would not receive while it sends.
    """
    return torch.Stream(device)


def wait_for_copies(devices: Iterable[torch.device]) -> None:
    """The devices' current streams wait for their copy streams."""
    for device in devices:
        current_stream(device).wait_stream(copy_stream(device, "arriving"))
        current_stream(device).wait_stream(copy_stream(device, "leaving"))


def side_streams(devices: Iterable[torch.device]) -> list[torch.Stream]:
    """The calling thread's current streams on the devices, where they are not the default ones."""
    streams = [current_stream(device) for device in dict.fromkeys(devices) if device.type != "cpu"]
    return [stream for stream in streams if stream.stream_id != 0]


@contextmanager
def on_streams(streams: Sequence[torch.Stream]) -> Iterator[None]:
    """Makes streams the calling thread's current ones on their devices; its device stays."""
    if not streams:
        yield
        return
    device = torch.accelerator.current_device_index()
    before = [current_stream(stream.device) for stream in streams]
    try:
        for stream in streams:
            torch.accelerator.set_stream(stream)  # also makes its device current
        torch.accelerator.set_device_index(device)
        yield
    finally:
        for stream in before:
            torch.accelerator.set_stream(stream)
        torch.accelerator.set_device_index(device)


def synchronize(*devices: torch.device) -> None:
    """Waits, once, for the calling thread's current streams on all of the devices."""
    streams = [current_stream(d) for d in dict.fromkeys(devices) if d.type != "cpu"]
    for stream in streams[1:]:
        streams[0].wait_stream(stream)
    for stream in streams[:1]:
        stream.synchronize()


class DeviceTimer:
    """The time from where it is made until devices are through with what was issued until `end`.

    Accelerators are timed by events on their current streams, the CPU by its clock.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        distinct = dict.fromkeys(devices)
        self._streams = [current_stream(device) for device in distinct if device.type != "cpu"]
        self._has_cpu = len(self._streams) < len(distinct)
        self._first, self._last = list(map(_timed_event, self._streams)), list[Any]()
        self._began, self._cpu_seconds = time.perf_counter(), 0.0

    def end(self) -> None:
        """All of the work has been issued."""
        if self._has_cpu:
            self._cpu_seconds = time.perf_counter() - self._began
        self._last = list(map(_timed_event, self._streams))

    def is_over(self) -> bool:
        """Whether the devices are through with it."""
        return len(self._last) == len(self._streams) and all([e.query() for e in self._last])

    def wait(self) -> None:
        """Waits until they are."""
        for event in self._last:
            event.synchronize()

    @property
    def device_seconds(self) -> float:
        """How long the accelerators took, once it is over; without any, the CPU."""
        pairs = zip(self._first, self._last, strict=True)
        return max([float(a.elapsed_time(b)) / 1e3 for a, b in pairs], default=self._cpu_seconds)

    @property
    def seconds(self) -> float:
        """How long it took, once it is over."""
        return max(self._cpu_seconds, self.device_seconds)


def _timed_event(stream: torch.Stream) -> Any:
    event: Any = torch.Event(stream.device, enable_timing=True)
    event.record(stream)
    return event
