"""Copies between devices: few large ones instead of many small ones."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_dp.parallel.links.buckets import group
from lightning_dp.parallel.links.streams import host_waits_for


def to_device_coalesced(
    tensors: Sequence[Tensor], device: torch.device, *, later: Collection[torch.device] = ()
) -> list[Tensor]:
    """The tensors on `device`; those from one device and of one dtype share one copy's memory.

    Differentiable: what has a graph travels alone, for a copy that several share would join their
    graphs. A backward of one would then go through those of the others, use them up, and leave
    zeros. Those on `device` stay the same objects. All copies are issued before any is waited for,
    and only those to the CPU are: work on an accelerator waits for what it reads, the host does
    not. Those from devices of which the caller says that it will wait `later`, by
    `host_waits_for`, must not be read before.

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


def joining_device(values: Sequence[object], output_device: torch.device) -> torch.device:
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
    arrived = iter(
        to_device_coalesced([g for g in gradients if g is not None and not g.is_sparse], device)
    )
    return [g if g is None else g.to(device) if g.is_sparse else next(arrived) for g in gradients]


def _sent(bucket: Sequence[Tensor], device: torch.device) -> Sequence[Tensor]:
    """The tensors of a bucket after one copy, which may still be under way."""
    if len(bucket) > 1:
        with contextlib.suppress(torch.OutOfMemoryError):  # to pack them takes memory
            return _sent_packed(bucket, device)
    return [_sent_alone(tensor, device) for tensor in bucket]


def _sent_alone(tensor: Tensor, device: torch.device) -> Tensor:
    has_graph = torch.is_grad_enabled() and tensor.requires_grad
    is_plain = tensor.layout is torch.strided and not tensor.is_nested
    if device.type == "cpu" and has_graph and is_plain:
        return _to_host(tensor)
    return tensor.to(device, non_blocking=True)


class _ToHost(torch.autograd.Function):
    """A copy to the host that is not waited for, and neither are those of its gradients.

    Autograd's own backward of a copy waits for the device.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.device = tensor.device
        return tensor.to("cpu", non_blocking=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        # Autograd lets the stream that goes on with it wait for the current one.
        return gradient.to(ctx.device, non_blocking=True)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent.to("cpu", non_blocking=True)


_to_host: Callable[[Tensor], Tensor] = _ToHost.apply


def _sent_packed(bucket: Sequence[Tensor], device: torch.device) -> Sequence[Tensor]:
    orders = [_memory_order(tensor) for tensor in bucket]
    rows = [tensor.permute(order) for tensor, order in zip(bucket, orders, strict=True)]
    packed = torch.cat([row.reshape(-1) for row in rows])
    # Autograd takes the parts of `split` for views of one tensor and refuses to change them in
    # place. Nobody else has this one.
    parts = torch.unsafe_split_with_sizes(
        packed.to(device, non_blocking=True), [tensor.numel() for tensor in bucket]
    )
    return [
        part.as_strided(tensor.shape, tensor.stride(), part.storage_offset())
        if row.is_contiguous()
        else part.view(row.shape).permute(sorted(range(len(order)), key=order.__getitem__))
        for tensor, part, row, order in zip(bucket, parts, rows, orders, strict=True)
    ]


def _memory_order(tensor: Tensor) -> list[int]:
    """The dimensions in the order of their strides, which channels_last keeps on the way."""
    dims = range(tensor.dim())
    return list(dims) if tensor.is_contiguous() else sorted(dims, key=tensor.stride, reverse=True)
