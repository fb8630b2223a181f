"""Links: how fast copies are on virtual time, and how soon their first byte arrives."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

import torch

from sim_devices import attached
from sim_devices.attached import DeviceLike, index_of

LinkEnd: TypeAlias = "int | str | torch.device"


@dataclass(frozen=True)
class Link:
    """One direction of a way between two devices, or between a device and the CPU."""

    bytes_per_second: float
    seconds: float


@dataclass(frozen=True)
class Links:
    """The links of a machine whose devices are alike.

    Args:
        host: between every device and the CPU.
        peer: between every two devices; None where they have no access to each other's memory, so
            that copies go through the CPU's.
    """

    host: Link
    peer: Link | None


PRESETS = MappingProxyType(
    {
        "pcie4": Links(host=Link(26e9, 7.5e-6), peer=None),
        "pcie4_peer": Links(host=Link(26e9, 7.5e-6), peer=Link(26e9, 2e-6)),
        "nvlink4": Links(host=Link(53e9, 7.5e-6), peer=Link(375e9, 2e-6)),
    }
)
"""Rates as measured, which are some 80 % of what the links are made for.

- `pcie4`: PCI Express 4.0 with 16 lanes (31.5 GB/s per direction by its specification), devices
  without access to each other, such as GeForce RTX 4090. CPU to device 26.3, back 27.1 GB/s
  (github.com/NVIDIA/nvbandwidth/issues/15). Between devices, through the CPU's memory, 20 to
  22 GB/s (github.com/NVIDIA/nccl/issues/814) and 11 to 20 microseconds
  (github.com/NVIDIA/cuda-samples/issues/230): each of the two ways has half of these.
- `pcie4_peer`: the same with peer access, such as RTX A6000: 26.3 GB/s between devices
  (github.com/NVIDIA/nvbandwidth/issues/50), 2 microseconds (cuda-samples/issues/230).
- `nvlink4`: eight H100 SXM with NVLink 4 (450 GB/s per direction by its specification) and PCI
  Express 5.0: 371 to 377 GB/s between devices (github.com/NVIDIA/nccl/issues/1264), 52.8 GB/s from
  a device to the CPU (github.com/NVIDIA/nvbandwidth/issues/24).
"""


def set_link(
    source: LinkEnd,
    target: LinkEnd,
    *,
    bytes_per_second: float = math.inf,
    seconds: float = 0.0,
) -> None:
    """Give copies from one device to another a speed on virtual time; the way back has its own.

    Each takes ``seconds + bytes / bytes_per_second``. Two devices without a link copy through the
    CPU, over the links of both with it: in pieces, so that it takes the time of the slower one, and
    the seconds of both. A link with the CPU that was not set costs nothing. What the copies of
    several devices share, such as a switch or the CPU's memory, is not simulated.

    Args:
        source: a device, or ``"cpu"``.
        target: another one.
        bytes_per_second: more than 0.
        seconds: at least 0.
    """
    if not bytes_per_second > 0:
        raise ValueError(
            f"set_link: expected bytes_per_second of more than 0, got {bytes_per_second}."
        )
    check_seconds("set_link", seconds=seconds)
    rate = 0.0 if math.isinf(bytes_per_second) else float(bytes_per_second)
    attached.extension.set_link(*_ends(source, target), rate, float(seconds))


def remove_link(source: LinkEnd, target: LinkEnd) -> None:
    """Take a link away: between two devices, copies go through the CPU again."""
    attached.extension.remove_link(*_ends(source, target))


def can_device_access_peer(device: DeviceLike, peer_device: DeviceLike) -> bool:
    """Return whether copies from one device to another need not go through the CPU's memory.

    They go through it where their links with the CPU were set, and none between the two. As with
    ``torch.cuda``, a device is no peer of its own.

    Args:
        device: a device; None: the current one.
        peer_device: another one.
    """
    ends = index_of(device), index_of(peer_device)
    return ends[0] != ends[1] and bool(attached.extension.can_access_peer(*ends))


def set_links(preset: str | None) -> None:
    """Give all devices and the CPU the links of a machine that there is; None takes all away.

    Args:
        preset: ``"pcie4"`` (PCI Express 4.0 x16, copies between devices go through the CPU),
            ``"pcie4_peer"`` (the same with peer access) or ``"nvlink4"`` (NVLink between H100s);
            their numbers and where these come from are in ``sim_devices.links.PRESETS``.
    """
    if preset is not None and preset not in PRESETS:
        raise ValueError(f"set_links: expected one of {[*PRESETS, None]}, got {preset!r}.")
    links = None if preset is None else PRESETS[preset]
    ends = range(-1, attached.extension.device_count())
    for source in ends:
        for target in ends:
            link = links and (links.host if -1 in (source, target) else links.peer)
            if link and source != target:
                attached.extension.set_link(source, target, link.bytes_per_second, link.seconds)
            else:
                attached.extension.remove_link(source, target)


def check_seconds(function: str, **named: float) -> None:
    """Refuses seconds, given by their names, that nothing can take."""
    for name, seconds in named.items():
        if not 0 <= seconds < math.inf:
            raise ValueError(f"{function}: expected {name} of at least 0, got {seconds}.")


def _ends(source: LinkEnd, target: LinkEnd) -> tuple[int, int]:
    ends = _end(source), _end(target)
    if ends[0] == ends[1]:
        raise ValueError(f"Expected a link between two devices, got {source!r} twice.")
    return ends


def _end(device: LinkEnd) -> int:
    """A device's index, or -1 for the CPU."""
    found = torch.device("sim", device) if isinstance(device, int) else torch.device(device)
    if found.type == "cpu":
        return -1
    count = attached.extension.device_count()
    if found.type != "sim" or found.index is None or found.index >= count:
        raise ValueError(
            f"Expected a link's end to be 'cpu' or one of sim:0 to sim:{count - 1}, got {device!r}."
        )
    return found.index
