"""Buckets: tensors that travel together, in one copy between two devices."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from itertools import accumulate
from operator import attrgetter
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from lightning_dp.parallel.comm.streams import synchronize
from lightning_dp.parallel.torch_private import copy_to_each

BUCKET_BYTES = 4 * 2**20
"""A bucket is full at this size; a larger tensor has one of its own."""
PIECE_BYTES = 2**20
"""Parameters, and gradients of large tensors, pass along the chain in pieces of this size."""

_ALIGNMENT = 256  # bytes, as kernels expect of memory of their own
_PLAIN = frozenset([Tensor, nn.Parameter])

kind = attrgetter("shape", "dtype", "layout")
"""Tensors can take another's place in a bucket if these are equal."""


class Packed(NamedTuple):
    """A bucket's tensors on a device: one flat tensor, and its views."""

    flat: Tensor
    views: list[Tensor]


class Bucket:
    """Tensors that travel together.

    Views keep the strides of the tensors where these are dense (channels_last stays so).

    Args:
        order: their positions among all tensors.
        tensors: these tensors, for their kinds and strides.
    """

    def __init__(self, order: Sequence[int], tensors: Sequence[Tensor]) -> None:
        self.order, self.positions = list(order), frozenset(order)
        self.dtype = tensors[0].dtype
        self._kinds = list(map(kind, tensors))
        self._like = [torch.empty_like(tensor, device="meta") for tensor in tensors]
        step = _ALIGNMENT // self.dtype.itemsize
        ends = [*accumulate(-(-tensor.numel() // step) * step for tensor in tensors)]
        self._starts, self._size = [0, *ends[:-1]], ends[-1]

    def of(self, tensors: Sequence[Any]) -> list[Any]:
        """The bucket's tensors among all tensors."""
        return [tensors[i] for i in self.order]

    def on(self, device: torch.device) -> Packed:
        """New memory for the bucket."""
        return self.in_memory(torch.zeros(self._size, dtype=self.dtype, device=device))

    def in_memory(self, flat: Tensor) -> Packed:
        """The bucket in the memory of a flat tensor."""
        views = [
            # By `.data` each view counts its own writes: autograd checks them by tensor.
            flat.data.as_strided(like.shape, like.stride(), start)
            for like, start in zip(self._like, self._starts, strict=True)
        ]
        return Packed(flat, views)

    def pack(self, row: Sequence[Tensor]) -> Packed:
        """Copies a row into new memory; a single dense tensor is flat, and has no views then."""
        if len(row) == 1 and row[0].stride() == self._like[0].stride():
            return Packed(row[0].detach().as_strided([row[0].numel()], [1]), [])
        packed = self.on(row[0].device)
        copy_to_each(packed.views, row)
        return packed

    def is_whole(self, row: Sequence[Tensor | None]) -> TypeGuard[Sequence[Tensor]]:
        """Whether a row has every tensor of the bucket, with its values in strided memory."""
        tensors: Sequence[Any] = row
        if not _PLAIN.issuperset(map(type, tensors)) or [*map(kind, tensors)] != self._kinds:
            return False
        # The memory of a lazily conjugated or negated tensor has other values.
        return not any([t.is_conj() or t.is_neg() for t in tensors])


def in_pieces(rows: Sequence[Tensor], num_bytes: int) -> Iterator[tuple[Tensor, ...]]:
    """Flat tensors of one length in pieces of about this size; equal places come together."""
    length = min(row.numel() for row in rows)  # a packed row has gaps, also at its end
    count = max(1, length * rows[0].itemsize // num_bytes)
    return zip(*[row[:length].chunk(count) for row in rows], strict=True)


def group(tensors: Sequence[Tensor], *, has_graphs: bool = False) -> Iterator[list[int]]:
    """Positions of tensors that travel together: from one device, of one dtype, until it is full.

    Trained and frozen tensors are apart, since they change at different times. Where tensors have
    graphs, those that require gradients are each alone: one copy would join their graphs.
    """
    buckets: dict[Hashable, list[int]] = {}  # those that are open, by what their tensors share
    room: dict[Hashable, int] = {}
    for i, tensor in enumerate(tensors):
        key = tensor.device, tensor.dtype, tensor.requires_grad
        is_alone = not can_be_packed(tensor) or (has_graphs and tensor.requires_grad)
        if is_alone or tensor.nbytes >= BUCKET_BYTES:
            yield [i]
            continue
        if key in buckets and tensor.nbytes > room[key]:
            yield buckets.pop(key)
        if key not in buckets:
            buckets[key], room[key] = [], BUCKET_BYTES
        buckets[key].append(i)
        room[key] -= tensor.nbytes
    yield from buckets.values()


def can_be_packed(tensor: Tensor) -> bool:
    """Whether a tensor is nothing but its elements in strided memory."""
    return type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_nested


# Copies


def to_device_coalesced(
    tensors: Sequence[Tensor], device: torch.device, *, later: Collection[torch.device] = ()
) -> list[Tensor]:
    """The tensors on `device`; those from one device and of one dtype share a copy's memory.

    Differentiable: a tensor with a graph travels alone, since a shared copy would join the graphs.
    Tensors that are on `device` stay the same objects. All copies are issued before this waits for
    any, which it does only for copies to the CPU.

    Args:
        tensors: on any devices.
        device: the target.
        later: devices for which the caller will call `synchronize` before it reads.

    Example:
        >>> to_device_coalesced([torch.ones(2)], torch.device("cpu"))
        [tensor([1., 1.])]
    """
    moved = list(tensors)
    away = [i for i, tensor in enumerate(tensors) if tensor.device != device]
    for bucket in group([tensors[i] for i in away], has_graphs=torch.is_grad_enabled()):
        sent = _sent([tensors[away[j]] for j in bucket], device)
        for j, tensor in zip(bucket, sent, strict=True):
            moved[away[j]] = tensor
    if device.type == "cpu":
        synchronize(*[d for i in away if (d := tensors[i].device) not in later])
    return moved


def _sent(tensors: Sequence[Tensor], device: torch.device) -> Sequence[Tensor]:
    """Tensors that share a bucket after one copy, which may still be under way."""
    if len(tensors) > 1:
        with torch.no_grad():
            bucket = Bucket(range(len(tensors)), tensors)
            flat = bucket.pack(tensors).flat
            return bucket.in_memory(flat.to(device, non_blocking=True)).views
    # A nested tensor's graph cannot pass through a function of our own.
    to_cpu = device.type == "cpu" and torch.is_grad_enabled() and tensors[0].requires_grad
    if to_cpu and can_be_packed(tensors[0]):
        return [_to_cpu(tensors[0])]
    return [tensors[0].to(device, non_blocking=True)]


class _ToCPU(torch.autograd.Function):
    """A copy to the CPU without a wait, also for its gradient; the copy of autograd would block."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.device = tensor.device
        return tensor.to("cpu", non_blocking=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.to(ctx.device, non_blocking=True)


_to_cpu: Callable[[Tensor], Tensor] = _ToCPU.apply


def gradients_on(device: torch.device, gradients: list[Tensor | None]) -> list[Tensor | None]:
    """Gradients, which lie on one device, on another one: in few copies, None where it was."""
    dense = [g for g in gradients if g is not None and not g.is_sparse]
    arrived = iter(to_device_coalesced(dense, device))
    return [g if g is None else g.to(device) if g.is_sparse else next(arrived) for g in gradients]
