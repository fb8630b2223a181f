"""Streams: what is in order on a device. The same code for all accelerators.

Work on one stream is in order, and so is what the host has waited for. Every thread has current
streams of its own, at first the default ones; so whoever goes on with a caller's work in another
thread enters the caller's streams there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch

from lightning_dp.parallel.contexts import Lasting


def current_stream(device: torch.device) -> torch.Stream:
    """The calling thread's current stream on an accelerator."""
    return torch.accelerator.current_stream(_index(device))


@cache
def _index(device: torch.device) -> int | None:
    """By a number torch finds a stream ten times as fast: it then does not ask for the device."""
    torch.accelerator.current_stream(device)  # refuses one of another kind
    return device.index


@cache
def own_stream(device: torch.device, purpose: str) -> torch.Stream:
    """The one stream of a device for a purpose that no caller's work has: devices have few."""
    return torch.Stream(device)


def are_accelerators(*devices: torch.device) -> bool:
    """Whether copies between them need not block the host."""
    return all([device.type != "cpu" for device in devices])


def side_streams(devices: Iterable[torch.device]) -> list[torch.Stream]:
    """The calling thread's current streams on the devices, where they are not the default ones."""
    streams = []
    for device in dict.fromkeys(devices):  # one frame in every step
        if device.type != "cpu":
            stream = current_stream(device)
            if stream.stream_id != 0:
                streams.append(stream)
    return streams


def on_streams(streams: Sequence[torch.Stream]) -> AbstractContextManager[None]:
    """Makes streams the calling thread's current ones on their devices; its device stays."""
    return _OnStreams(streams) if streams else nullcontext()


class _OnStreams(Lasting):
    def __init__(self, streams: Sequence[torch.Stream]) -> None:
        self._streams = streams
        self._device = torch.accelerator.current_device_index()
        self._before = [current_stream(stream.device) for stream in streams]

    def begin(self) -> None:
        """These are current."""
        self._set(self._streams)

    def end(self) -> None:
        """Those from before are current."""
        self._set(self._before)

    def _set(self, streams: Sequence[torch.Stream]) -> None:
        for stream in streams:
            torch.accelerator.set_stream(stream)  # and its device
        torch.accelerator.set_device_index(self._device)


def host_waits_for(*devices: torch.device) -> None:
    """Lets the host wait, once, for what this thread has issued to devices' current streams."""
    own = dict.fromkeys(devices)
    streams = [current_stream(d) for d in own if d.type != "cpu"]
    for stream in streams[1:]:
        streams[0].wait_stream(stream)
    for stream in streams[:1]:
        stream.synchronize()
