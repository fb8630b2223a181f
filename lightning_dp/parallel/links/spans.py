"""Spans: how long devices are at work, which are told to earlier. The same for all accelerators."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch

from lightning_dp.parallel.links.streams import current_stream


class Span:
    """What one accelerator does between two marks, on what is the thread's current stream there.

    The marks are events: nobody waits for them until somebody does.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = current_stream(device)
        self._first = self._mark()
        self._last: Any = None

    def end(self) -> None:
        """All that belongs to it has been issued."""
        self._last = self._mark()

    def is_over(self) -> bool:
        """Whether the device is through with it."""
        return self._last is not None and self._last.query()

    def wait(self) -> None:
        """Waits until the device is through with it."""
        if self._last is not None:
            self._last.synchronize()

    @property
    def seconds(self) -> float:
        """How long it took, once it is over."""
        return float(self._first.elapsed_time(self._last)) / 1e3

    def _mark(self) -> Any:
        mark: Any = torch.Event(self._stream.device, enable_timing=True)
        mark.record(self._stream)
        return mark


class Stretch:
    """A stretch of work of several devices: from where it is made until all are through with it.

    The CPU is as soon as the host has done its part. Where it is none of them, their own clocks
    tell.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        own = dict.fromkeys(devices)
        self._spans = [Span(device) for device in own if device.type != "cpu"]
        self._is_the_hosts = len(self._spans) < len(own)
        self._began = time.perf_counter()
        self._host = 0.0

    def end(self) -> None:
        """All of it has been issued."""
        if self._is_the_hosts:
            self._host = time.perf_counter() - self._began
        for span in self._spans:
            span.end()

    def is_over(self) -> bool:
        """Whether all devices are through with it."""
        return all([span.is_over() for span in self._spans])

    @property
    def seconds(self) -> float:
        """How long it took, once it is over."""
        return max([self._host, *[span.seconds for span in self._spans]])

    @property
    def device_seconds(self) -> float:
        """How long it took by the accelerators' own clocks, once it is over; else by the host's.

        Their marks come when the host has issued what is before them: its time is in theirs.
        """
        return max([span.seconds for span in self._spans], default=self._host)
