"""Packing: tensors of fixed kinds that often travel together, as views of a few flat ones."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_dp.parallel.links.pipeline import Pipeline, copy_each
from lightning_dp.parallel.links.streams import are_accelerators
from lightning_dp.parallel.links.summing import Summing, kind
from lightning_dp.parallel.torch_private import copy_to_each

BUCKET_BYTES = 4 * 2**20
"""A bucket is full once it holds this much; larger tensors travel alone."""

_ALIGNMENT = 256  # bytes, as kernels expect of memory of its own


class Packing:
    """Which tensors lie in which bucket, and where: those of one dtype, at most a bucket's bytes.

    Tensors keep their strides (channels_last stays channels_last) where these are dense. Those that
    will change together are best of one `requires_grad`: they share a bucket.

    Packing takes memory. Where a device has none left for it, tensors travel one by one.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._kinds = list(map(kind, tensors))
        self.buckets = [
            Bucket(positions, [tensors[i] for i in positions])
            for positions in sorted(buckets(tensors))  # as a forward needs them
            if can_be_packed(tensors[positions[0]])
        ]
        packed = set().union(*(bucket.positions for bucket in self.buckets))
        self.alone = [i for i in range(len(tensors)) if i not in packed]  # cannot be packed
        self._staged: dict[torch.device, list[Packed] | None] = {}
        self._pipeline = Pipeline()
        self.sums = Summing(self.buckets, BUCKET_BYTES)  # of several devices' tensors

    def fits(self, tensors: Sequence[Tensor | None]) -> bool:
        """Whether these are of the kinds that this is for, every one of them."""
        try:
            return list(map(kind, tensors)) == self._kinds
        except AttributeError:  # one is None
            return False

    def memory(
        self, tensors: Sequence[Tensor], device: torch.device
    ) -> tuple[list[Packed], list[Tensor]]:
        """Memory for tensors of these kinds on a device: bucket by bucket, and one by one."""
        packed = [bucket.on(device) for bucket in self.buckets]
        own = {i: tensors[i].detach().to(device, copy=True) for i in self.alone}
        for bucket, there in zip(self.buckets, packed, strict=True):
            own.update(zip(bucket.of(range(len(tensors))), there.views, strict=True))
        return packed, [own[i] for i in range(len(tensors))]

    def staged(self, device: torch.device) -> list[Packed] | None:
        """Memory through which they pass on a device: the buckets have two places, in turn.

        One is packed while another leaves. None where there was no room for it.
        """
        if device not in self._staged:
            self._staged[device] = self._memory_on(device)
        return self._staged[device]

    def _memory_on(self, device: torch.device) -> list[Packed] | None:
        size = max([bucket.bytes for bucket in self.buckets], default=0)
        room = partial(torch.zeros, size, dtype=torch.uint8, device=device)
        try:
            memory = [room() for _ in self.buckets[:2]]
        except torch.OutOfMemoryError:
            return None
        return [bucket.in_memory(memory[j % 2]) for j, bucket in enumerate(self.buckets)]

    def send(self, sources: Sequence[Tensor], targets: Sequence[Sequence[Packed]]) -> None:
        """Copies tensors of these kinds, which are on one device, to memory for them.

        For each bucket there are `targets`: it is packed once. Between accelerators see `pipeline`.
        """
        if not any(targets):
            return
        device = sources[0].device
        staged = self.staged(device)
        self._pipeline.settle()
        for j, (bucket, there) in enumerate(zip(self.buckets, targets, strict=True)):
            here = staged[j] if staged and there else None
            if here is not None:
                self._stage(here, bucket.of(sources))
                self._pipeline.send(here.flat, [packed.flat for packed in there])
            for packed in there if here is None else ():
                copy_each(packed.views, bucket.of(sources))
        self._pipeline.arrive()

    def _stage(self, here: Packed, sources: Sequence[Tensor]) -> None:
        """Packs a bucket where it is to leave from, when what was there before has left."""
        self._pipeline.claim(here.flat)
        copy_to_each(here.views, sources)

    def copy(self, sources: Sequence[Tensor], copies: Sequence[Sequence[Tensor]]) -> None:
        """Copies tensors of these kinds, which are on one device, to tensors with their own memory.

        There is one sequence of `copies` for each target. They share one copy of a bucket to their
        device; what cannot be packed is left out.
        """
        here = sources[0].device if sources else None
        away: dict[torch.device, list[Sequence[Tensor]]] = {}
        for copy in copies if sources else ():
            away.setdefault(copy[0].device, []).append(copy)
        for j, bucket in enumerate(self.buckets):
            for device, targets in away.items():
                parts: Sequence[Tensor] = bucket.of(sources)
                if device != here and len(parts) > 1:
                    parts = self._sent(j, parts, device)
                for target in targets:
                    copy_to_each(bucket.of(target), parts)

    def _sent(self, j: int, parts: Sequence[Tensor], device: torch.device) -> Sequence[Tensor]:
        """The tensors of a bucket on another device, where they pass through."""
        staged, arrived = self.staged(parts[0].device), self.staged(device)
        if staged is None or arrived is None:
            return [part.to(device) for part in parts]
        here, there = staged[j], arrived[j]
        self._stage(here, parts)
        self._pipeline.claim(there.flat)
        there.flat.copy_(here.flat, non_blocking=are_accelerators(here.flat.device, device))
        return there.views


class Packed(NamedTuple):
    """The tensors of a bucket on a device: one flat tensor, and its views."""

    flat: Tensor
    views: list[Tensor]


class Bucket:
    """Tensors that travel together, at these positions among all tensors.

    From all tensors `of` takes them. The size counts their elements, gaps included.
    """

    def __init__(self, positions: list[int], tensors: list[Tensor]) -> None:
        self.positions = set(positions)
        get: Any = itemgetter(*positions)
        self.of: Callable[[Sequence[Any]], tuple[Any, ...]] = (
            get if len(positions) > 1 else lambda tensors: (get(tensors),)
        )
        self.dtype = tensors[0].dtype
        self._like = [torch.empty_like(tensor, device="meta") for tensor in tensors]
        step = _ALIGNMENT // self.dtype.itemsize
        ends = list(accumulate(-(-tensor.numel() // step) * step for tensor in tensors))
        self._places = [0, *ends]
        self.size = ends[-1]
        self.bytes = self.size * self.dtype.itemsize
        self.kinds = list(map(kind, tensors))
        self.length, self.stride = tensors[0].numel(), self._like[0].stride()  # of the first one

    def of_elements(self, length: int) -> Bucket:
        """One of so many elements of a tensor, in a row."""
        return Bucket([0], [torch.empty(length, dtype=self.dtype, device="meta")])

    def on(self, device: torch.device) -> Packed:
        """The tensors in memory of their own."""
        return self.in_memory(torch.zeros(self.size, dtype=self.dtype, device=device))

    def in_memory(self, memory: Tensor) -> Packed:
        """The tensors at the beginning of memory that is there."""
        flat = memory.view(self.dtype)[: self.size]
        views = [
            # Through `.data`: a write to one must not seem to be one to all.
            flat.data.as_strided(like.shape, like.stride(), place)
            for like, place in zip(self._like, self._places, strict=False)
        ]
        return Packed(flat, views)


def buckets(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """Positions of tensors that travel together: of one kind, at most a bucket's bytes."""
    open_buckets: dict[Hashable, tuple[list[int], int]] = {}
    for i, tensor in enumerate(tensors):
        if not can_be_packed(tensor):
            yield [i]
            continue
        # Together, those without a gradient would come out as if they had one.
        own = tensor.dtype, tensor.requires_grad
        positions, size = open_buckets.get(own, ([], 0))
        added = tensor.numel() * tensor.element_size()
        if added >= BUCKET_BYTES:
            yield [i]
            continue
        if positions and size + added > BUCKET_BYTES:
            yield positions
            positions, size = [], 0
        open_buckets[own] = ([*positions, i], size + added)
    yield from (positions for positions, _ in open_buckets.values())


def can_be_packed(tensor: Tensor) -> bool:
    """Whether a tensor is nothing but its elements."""
    is_plain = type(tensor) in (Tensor, nn.Parameter)
    return is_plain and tensor.layout is torch.strided and not tensor.is_nested
