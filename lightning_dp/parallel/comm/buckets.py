"""Buckets: which tensors travel together, and where each lies in flat memory. Nothing is copied."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from itertools import accumulate
from operator import attrgetter
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

BUCKET_BYTES = 4 * 2**20
"""A bucket is full at this size; a larger tensor has a bucket of its own."""

FIRST_BYTES = 2**19
"""The first bucket is smaller: a backward fills it last, so a step waits for its whole journey."""

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
        self.kinds = list(map(kind, tensors))
        self.length = tensors[0].numel()  # of the first tensor
        self._like = [torch.empty_like(tensor, device="meta") for tensor in tensors]
        step = _ALIGNMENT // self.dtype.itemsize
        ends = [*accumulate(-(-tensor.numel() // step) * step for tensor in tensors)]
        self._starts, self.size = [0, *ends[:-1]], ends[-1]
        self.bytes = self.size * self.dtype.itemsize

    def of(self, tensors: Sequence[Any]) -> list[Any]:
        """The bucket's tensors among all tensors."""
        return [tensors[i] for i in self.order]

    def fits(self, row: Sequence[Tensor | None]) -> TypeGuard[Sequence[Tensor]]:
        """Whether a row of tensors is of the kinds that the bucket is for; False if one is None."""
        return _PLAIN.issuperset(map(type, row)) and [*map(kind, row)] == self.kinds

    def flat_memory(self, row: Sequence[Tensor]) -> Tensor | None:
        """The memory of a bucket's only tensor, if it lies as the bucket would have it."""
        if len(row) > 1 or row[0].stride() != self._like[0].stride():
            return None
        if row[0].is_conj() or row[0].is_neg():  # computed when it is read
            return None
        return row[0].detach().as_strided([self.length], [1])

    def on(self, device: torch.device) -> Packed:
        """New memory for the bucket."""
        return self.in_memory(torch.zeros(self.size, dtype=self.dtype, device=device))

    def in_memory(self, memory: Tensor) -> Packed:
        """The bucket at the beginning of a flat tensor."""
        flat = memory.view(self.dtype)[: self.size]
        views = [
            # By `.data` each view counts its own writes: autograd checks them by tensor.
            flat.data.as_strided(like.shape, like.stride(), start)
            for like, start in zip(self._like, self._starts, strict=True)
        ]
        return Packed(flat, views)


def group(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """Positions of tensors that travel together: of one dtype, at most a bucket's bytes.

    Trained and frozen tensors are apart, since they change at different times.
    """
    open_buckets: dict[Hashable, list[int]] = {}
    sizes: dict[Hashable, int] = {}
    limits: dict[Hashable, int] = {}
    for i, tensor in enumerate(tensors):
        if not can_be_packed(tensor) or tensor.nbytes >= BUCKET_BYTES:
            yield [i]
            continue
        key, size = (tensor.dtype, tensor.requires_grad), tensor.nbytes
        if key in open_buckets and sizes[key] + size > limits.get(key, FIRST_BYTES):
            yield open_buckets.pop(key)
            limits[key] = BUCKET_BYTES
        open_buckets.setdefault(key, []).append(i)
        sizes[key] = size + (sizes[key] if len(open_buckets[key]) > 1 else 0)
    yield from open_buckets.values()


def can_be_packed(tensor: Tensor) -> bool:
    """Whether a tensor is nothing but its elements in strided memory."""
    return type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_nested
