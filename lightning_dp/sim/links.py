"""Links of machines that there are: how fast copies are, and how soon their first byte arrives."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType


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
