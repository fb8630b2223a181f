"""Timing: how long each device works on a step, by the best clock that it has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lightning_dp.parallel.devices import busy_clock, current_stream


class StepTimer:
    """Times the replicas' work from `start` to `stop`.

    A device that counts its own work (simulated ones with a speed) is believed. GPUs compute
    asynchronously: events at both ends tell when each is through with its work. Elsewhere it is
    the time that the workers spent in the replica's calls.

    Args:
        devices: the replicas' devices, root first; an entry may repeat.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = list(devices)
        # Replicas on one device share its clock, which then cannot tell them apart.
        self._have_clocks = len(set(devices)) == len(self._devices)
        self._spent = [0.0] * len(self._devices)
        self._spans: list[_Span] = []
        self._began: list[float] = []
        self._result: list[float] | None = None

    def start(self) -> None:
        """The step begins; what was measured of the last one and not taken is dropped."""
        self._result = None
        self._spent = [0.0] * len(self._devices)
        self._began = [busy_clock(device) for device in self._devices] if self._have_clocks else []
        is_cuda = self._have_clocks and all(device.type == "cuda" for device in self._devices)
        self._spans = [_Span(device) for device in self._devices] if is_cuda else []

    def add(self, k: int, seconds: float) -> None:
        """A worker spent so many seconds in calls of replica k."""
        self._spent[k] += seconds

    def stop(self) -> None:
        """The step's work has been handed to the devices."""
        for span in self._spans:
            span.end()
        pairs = zip(self._devices, self._began, strict=False)
        counted = [busy_clock(device) - before for device, before in pairs]
        self._result = counted if any(counted) else self._spent

    def take(self) -> list[float] | None:
        """Seconds per replica of the step that stopped last, once; None if they are not known."""
        result, self._result = self._result, None
        if result is None or not self._spans:
            return result
        spans, self._spans = self._spans, []
        return [span.seconds() for span in spans] if all(s.is_over() for s in spans) else None


class _Span:
    """The time between two points of a GPU's current stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = current_stream(device)
        self._first: Any = torch.Event(device, enable_timing=True)
        self._last: Any = torch.Event(device, enable_timing=True)
        self._first.record(self._stream)

    def end(self) -> None:
        self._last.record(self._stream)

    def is_over(self) -> bool:
        return bool(self._last.query())

    def seconds(self) -> float:
        return float(self._first.elapsed_time(self._last)) / 1e3
