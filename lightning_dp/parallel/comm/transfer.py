"""Copies between devices: few large ones instead of many small ones."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_dp.parallel.comm.buckets import Bucket, group
from lightning_dp.parallel.comm.streams import host_waits_for
from lightning_dp.parallel.torch_private import copy_to_each


def to_device_coalesced(
    tensors: Sequence[Tensor], device: torch.device, *, later: Collection[torch.device] = ()
) -> list[Tensor]:
    """The tensors on `device`; those from one device and of one dtype share a copy's memory.

    Differentiable: a tensor with a graph travels alone, since a shared copy would join the graphs.
    Tensors that are on `device` stay the same objects. All copies are issued before the host waits,
    which it does only for copies to the CPU.

    Args:
        tensors: on any devices.
        device: the target.
        later: devices for which the caller will call `host_waits_for` before it reads.

    Example:
        >>> to_device_coalesced([torch.ones(2)], torch.device("cpu"))
        [tensor([1., 1.])]
    """
    moved, has_graphs = list(tensors), torch.is_grad_enabled()
    sources = dict.fromkeys(tensor.device for tensor in tensors if tensor.device != device)
    for source in sources:
        away = [i for i, tensor in enumerate(tensors) if tensor.device == source]
        alone = {i for i in away if has_graphs and tensors[i].requires_grad}
        others = [i for i in away if i not in alone]
        packed = [[others[j] for j in bucket] for bucket in group([tensors[i] for i in others])]
        for positions in [*packed, *([i] for i in alone)]:
            parts = _sent([tensors[i] for i in positions], device)
            for i, part in zip(positions, parts, strict=True):
                moved[i] = part
    if device.type == "cpu":
        host_waits_for(*[source for source in sources if source not in later])
    return moved


def scalar_device(values: Sequence[object], output_device: torch.device) -> torch.device:
    """Where a few small values become one: not on the host, which would wait for each device."""
    if output_device.type == "cpu":
        for value in values:
            if isinstance(value, Tensor) and value.device.type != "cpu":
                return value.device
    return output_device


def gradients_on(device: torch.device, gradients: list[Tensor | None]) -> list[Tensor | None]:
    """Gradients, which lie on one device, on another one: in few copies, None where it was."""
    first = next((gradient for gradient in gradients if gradient is not None), None)
    if first is None or first.device == device:
        return gradients
    dense = [g for g in gradients if g is not None and not g.is_sparse]
    arrived = iter(to_device_coalesced(dense, device))
    return [g if g is None else g.to(device) if g.is_sparse else next(arrived) for g in gradients]


def _sent(tensors: Sequence[Tensor], device: torch.device) -> Sequence[Tensor]:
    """Tensors that share a bucket after one copy, which may still be under way."""
    if len(tensors) > 1:
        with contextlib.suppress(torch.OutOfMemoryError), torch.no_grad():
            bucket = Bucket(range(len(tensors)), tensors)
            packed = bucket.on(tensors[0].device)
            copy_to_each(packed.views, tensors)
            return bucket.in_memory(packed.flat.to(device, non_blocking=True)).views
    return [_sent_alone(tensor, device) for tensor in tensors]


def _sent_alone(tensor: Tensor, device: torch.device) -> Tensor:
    has_graph = torch.is_grad_enabled() and tensor.requires_grad
    is_plain = tensor.layout is torch.strided and not tensor.is_nested
    if device.type == "cpu" and has_graph and is_plain:
        return _to_host(tensor)
    return tensor.to(device, non_blocking=True)


class _ToHost(torch.autograd.Function):
    """A copy to the host without a wait, also for its gradient; autograd's own would block."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.device = tensor.device
        return tensor.to("cpu", non_blocking=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.to(ctx.device, non_blocking=True)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent.to("cpu", non_blocking=True)


_to_host: Callable[[Tensor], Tensor] = _ToHost.apply
