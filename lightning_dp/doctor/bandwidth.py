"""Links, measured: between each pair of devices, and to the host."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_dp.doctor.bench import pinned, synchronize
from lightning_dp.parallel.devices import memory_capacity

HOST = torch.device("cpu")
MOST_BYTES = 64 * 2**20
LEAST_BYTES = 2**20
SECONDS = 0.004  # that a copy should take at least, to be told from its start
SECONDS_FOR_ALL = 3.0  # after which messages stay small
ROUNDS = 3


@dataclass(frozen=True)
class Link:
    """The way from one device to another.

    Args:
        source: where a copy comes from.
        target: where it goes.
        bytes_per_second: of the fastest copy of several; to and from pinned memory on the host.
        peer_access: whether the devices reach each other's memory; None where nobody says.
    """

    source: str
    target: str
    bytes_per_second: float
    peer_access: bool | None = None

    def as_json(self) -> dict[str, Any]:
        """As it is in the file."""
        return asdict(self)


def measured_links(devices: Sequence[torch.device]) -> list[Link]:
    """Every link of these devices, to the host, too; none where all are the CPU."""
    ends = list(dict.fromkeys([HOST, *devices]))
    pairs = [(source, target) for source in ends for target in ends if source != target]
    start, links = time.perf_counter(), []
    for source, target in pairs:
        is_late = time.perf_counter() - start > SECONDS_FOR_ALL
        speed = _bandwidth(source, target, LEAST_BYTES if is_late else MOST_BYTES)
        links.append(Link(str(source), str(target), speed, _peers(source, target)))
    return links


def _bandwidth(source: torch.device, target: torch.device, most: int) -> float:
    """Bytes per second. Messages grow until one takes long enough, or much of a memory."""
    own = [memory_capacity(device) for device in (source, target)]
    most = min([most, *(capacity // 16 for capacity in own if capacity)])
    size = min(LEAST_BYTES, most)
    seconds = _seconds(source, target, size)
    while seconds < SECONDS and size < most:
        size = min(4 * size, most)
        seconds = _seconds(source, target, size)
    return size / max(seconds, 1e-9)


def _seconds(source: torch.device, target: torch.device, size: int) -> float:
    message, there = _buffer(source, size), _buffer(target, size)
    best = float("inf")
    for i in range(1 + ROUNDS):  # the first one sets up what is missing
        synchronize([source, target])
        start = time.perf_counter()
        there.copy_(message, non_blocking=True)
        synchronize([source, target])
        if i:
            best = min(best, time.perf_counter() - start)
    return best


def _buffer(device: torch.device, size: int) -> Tensor:
    buffer = torch.zeros(size, dtype=torch.uint8, device=device)
    return pinned(buffer) if device.type == "cpu" else buffer


def _peers(source: torch.device, target: torch.device) -> bool | None:
    if source.type != "cuda" or target.type != "cuda":
        return None
    return torch.cuda.can_device_access_peer(source, target)
