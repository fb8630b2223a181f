"""Streams: what is in order on a device. The same code for all accelerators.

Work on one stream is in order, and so is what the host has waited for. Every thread has current
streams of its own, at first the default ones; so whoever goes on with a caller's work in another
thread enters the caller's streams there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch


def side_streams(devices: Iterable[torch.device]) -> list[torch.Stream]:
    """The calling thread's current streams on the devices, where they are not the default ones."""
    own = dict.fromkeys(device for device in devices if device.type != "cpu")
    streams = [torch.accelerator.current_stream(device) for device in own]
    return [stream for stream in streams if stream.stream_id != 0]


@contextlib.contextmanager
def on_streams(streams: Sequence[torch.Stream]) -> Iterator[None]:
    """Makes streams the calling thread's current ones on their devices; its device stays."""
    if not streams:
        yield
        return
    before = [torch.accelerator.current_stream(stream.device) for stream in streams]
    _set(streams)
    try:
        yield
    finally:
        _set(before)


def _set(streams: Sequence[torch.Stream]) -> None:
    device = torch.accelerator.current_device_index()
    for stream in streams:
        torch.accelerator.set_stream(stream)  # and its device
    torch.accelerator.set_device_index(device)


def host_waits_for(device: torch.device) -> None:
    """Lets the host wait for what this thread has issued to a device's current stream."""
    if device.type != "cpu":
        torch.accelerator.current_stream(device).synchronize()
