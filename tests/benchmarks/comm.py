"""The C functions of `torch.nn.parallel` that PyTorch's CPU wheels lack, in Python.

`nn.DataParallel` is Python on top of these. They do what their C++ does (torch/csrc/cuda/comm.cpp)
without NCCL: the same copies in the same order on the same streams, none of which the host waits
for. So on simulated devices its schedule is the one it has on GPUs without NCCL, which is also the
one on a single GPU that is used several times.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._utils import (
    _flatten_dense_tensors,
    _reorder_tensors_as,
    _take_tensors,
    _unflatten_dense_tensors,
)

NAMES = ("_broadcast", "_broadcast_coalesced", "_scatter", "_gather")


def install() -> None:
    """Gives torch those functions that it does not have."""
    functions: dict[str, Any] = {
        "_broadcast": broadcast,
        "_broadcast_coalesced": broadcast_coalesced,
        "_scatter": scatter,
        "_gather": gather,
    }
    for name, function in functions.items():
        if not hasattr(torch._C, name):
            setattr(torch._C, name, function)


def _device(index: int) -> torch.device:
    accelerator = torch.accelerator.current_accelerator()
    if index < 0 or accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, index)


def broadcast(tensor: Tensor, devices: Sequence[int]) -> list[Tensor]:
    """The tensor on each device: itself on its own one, and copies elsewhere."""
    return [
        tensor if _device(index) == tensor.device else _copied(tensor, index) for index in devices
    ]


def _copied(tensor: Tensor, index: int) -> Tensor:
    with torch.accelerator.device_index(index):
        return torch.empty_like(tensor, device=_device(index)).copy_(tensor, non_blocking=True)


def broadcast_coalesced(
    tensors: Sequence[Tensor], devices: Sequence[int], buffer_size: int
) -> list[list[Tensor]]:
    """The tensors themselves, on their own device, and copies; they travel in such buffers."""
    copies: list[list[Tensor]] = [[] for _ in devices[1:]]
    for chunk in _take_tensors(tensors, buffer_size):
        _, *arrived = broadcast(_flatten_dense_tensors(chunk), devices)
        for own, index, flat in zip(copies, devices[1:], arrived, strict=True):
            with torch.accelerator.device_index(index):
                # As new tensors, which do not know each other's versions.
                own.extend(part.data for part in _unflatten_dense_tensors(flat, chunk))
    # Chunks have one type each.
    return [list(tensors), *(list(_reorder_tensors_as(own, tensors)) for own in copies)]


def scatter(
    tensor: Tensor,
    devices: Sequence[int],
    chunk_sizes: Sequence[int] | None,
    dim: int,
    streams: Sequence[torch.Stream | None] | None,
) -> list[Tensor]:
    """Chunks of the tensor, each on its device, copied on the device's stream if there is one."""
    if chunk_sizes is None:
        chunks = tensor.chunk(len(devices), dim)
    else:
        chunks = tensor.split(list(chunk_sizes), dim)
    moved = list(chunks)
    for i, (chunk, index) in enumerate(zip(chunks, devices, strict=False)):
        if _device(index) != tensor.device:
            with (streams and streams[i]) or contextlib.nullcontext():
                moved[i] = chunk.to(_device(index), non_blocking=True)
    return moved


def gather(tensors: Sequence[Tensor], dim: int, destination: int | None) -> Tensor:
    """The tensors one after another on one device."""
    if destination is None:
        destination = torch.accelerator.current_device_index()
    shape = list(tensors[0].shape)
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    joined = tensors[0].new_empty(shape, device=_device(destination))
    places = joined.split([tensor.shape[dim] for tensor in tensors], dim)
    for place, tensor in zip(places, tensors, strict=True):
        place.copy_(tensor, non_blocking=True)
    return joined
