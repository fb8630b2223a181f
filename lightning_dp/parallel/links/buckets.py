"""Buckets: which tensors travel together, and where each lies in memory. Nothing is copied here."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import accumulate, islice
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

BUCKET_BYTES = 4 * 2**20
"""A bucket is full once it holds this much; larger tensors travel alone."""

FIRST_BYTES = 2**19
"""That the first bucket is full with; each next one may hold twice as much. A forward begins once
the first parameters are there, and a backward is through once the first layer's gradients have
left: with a small bucket both are sooner. It still takes a link longer than to begin, see
`routes`."""

BLOCK = 4
"""Buckets that lie in a row, and can go out in one copy."""

_ALIGNMENT = 256  # bytes, as kernels expect of memory of its own

kind = attrgetter("shape", "dtype", "layout")
"""What packed tensors must not differ in from those that they were packed for."""


class Packed(NamedTuple):
    """The tensors of a bucket on a device: one flat tensor, and its views.

    It may lie in a `block`, which holds several.
    """

    flat: Tensor
    views: list[Tensor]
    block: Packed | None = None

    def split(self, buckets: Sequence[Bucket]) -> list[Packed]:
        """These buckets, of which this is the block."""
        flats = self.flat.split([bucket.size for bucket in buckets])
        views = iter(self.views)
        return [
            Packed(flat, [*islice(views, len(bucket.order))], self)
            for flat, bucket in zip(flats, buckets, strict=True)
        ]


class Bucket:
    """Tensors that travel together, at these positions among all tensors.

    From all tensors `of` takes them. The size counts their elements, gaps included.
    """

    def __init__(self, positions: list[int], tensors: list[Tensor]) -> None:
        self.positions, self.order = set(positions), positions
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

    def is_like(self, tensors: Sequence[Tensor]) -> bool:
        """Whether this is of one tensor, and these are another that lies in memory in that way."""
        if len(self.order) > 1:
            return False
        (other,) = tensors
        return other.stride() == self.stride and not (other.is_conj() or other.is_neg())

    def flat(self, tensors: Sequence[Tensor]) -> Tensor:
        """The elements of one that `is_like` this, as they lie in memory."""
        return tensors[0].detach().as_strided([self.length], [1])

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


def group(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """Positions of tensors that travel together: of one kind, at most a bucket's bytes.

    The first ones hold less: see `FIRST_BYTES`.
    """
    open_buckets: dict[Hashable, tuple[list[int], int]] = {}
    most: dict[Hashable, int] = defaultdict(lambda: min(FIRST_BYTES, BUCKET_BYTES))
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
        if positions and size + added > most[own]:
            most[own] = min(2 * most[own], BUCKET_BYTES)
            yield positions
            positions, size = [], 0
        open_buckets[own] = ([*positions, i], size + added)
    yield from (positions for positions, _ in open_buckets.values())


def blocks(buckets: Sequence[Bucket]) -> Iterator[range]:
    """Which buckets lie in a row: of one dtype, at most `BLOCK` times a bucket's bytes.

    The first one is alone: nothing leaves before it is packed.
    """
    first, size = 0, most_bytes(BLOCK)
    for j, bucket in enumerate(buckets):
        size += bucket.bytes
        if j > first and (size > most_bytes(BLOCK) or bucket.dtype != buckets[first].dtype):
            yield range(first, j)
            first, size = j, bucket.bytes
    if buckets:
        yield range(first, len(buckets))


def most_bytes(count: int = 1) -> int:
    """Of so many buckets, unless one of them is a single large tensor."""
    return count * BUCKET_BYTES


def are_whole(targets: Sequence[Sequence[Packed]]) -> bool:
    """Whether these targets of the buckets of a block are the same blocks."""
    first, *others = ([id(own.block) for own in row] for row in targets)
    return all([ids == first for ids in others])


def can_be_packed(tensor: Tensor) -> bool:
    """Whether a tensor is nothing but its elements."""
    is_plain = type(tensor) in (Tensor, nn.Parameter)
    return is_plain and tensor.layout is torch.strided and not tensor.is_nested
