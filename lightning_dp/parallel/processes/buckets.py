"""Buckets: gradients that travel together between processes, and what tells which of them exist.

All processes have the same parameters, so they make the same buckets without asking each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

BUCKET_BYTES = 4 * 2**20
"""A bucket is full once it holds this much; a larger gradient travels alone, in pieces of it."""


Gradients: TypeAlias = list[Tensor | None]


class Bucket:
    """Gradients of one dtype, at these positions among all parameters.

    Behind the gradients lie two flags for each of them: whether it is there and dense, or sparse;
    and one for the bucket, see `Sums`. Added up, they tell how many processes have it.
    """

    def __init__(self, positions: Sequence[int], parameters: Sequence[Tensor]) -> None:
        self.positions = list(positions)
        self.dtype, self.device = parameters[0].dtype, parameters[0].device
        self.like = [_like(parameter) for parameter in parameters]
        ends = [0, *accumulate(like.numel() for like in self.like)]
        self._places, self.size = ends[:-1], ends[-1]
        self.num_flags = 2 * len(positions) + 1
        self.pieces = self._cut()

    def _cut(self) -> list[Piece]:
        step = max(1, BUCKET_BYTES // self.dtype.itemsize)
        if len(self.positions) > 1 or self.size <= step:
            return [Piece(self, range(0), self.size + self.num_flags)]
        starts = range(step, self.size, step)
        first = Piece(self, range(step), step + self.num_flags)
        others = [range(start, min(start + step, self.size)) for start in starts]
        return [first, *[Piece(self, part, len(part)) for part in others]]

    def views(self, flat: Tensor) -> list[Tensor]:
        """The gradients in the memory of a piece that holds them all, with their strides."""
        return [
            flat.as_strided(like.shape, like.stride(), place)
            for like, place in zip(self.like, self._places, strict=True)
        ]

    def flags(self, gradients: Sequence[Tensor | None], *, late: bool) -> list[float]:
        """What this process tells of its gradients."""
        flags = [0.0] * self.num_flags
        for k, gradient in enumerate(gradients):
            if gradient is not None:
                flags[2 * k + (gradient.layout is not torch.strided)] = 1.0
        flags[-1] = float(late)
        return flags


class Piece(NamedTuple):
    """Elements of a bucket that travel at a time.

    That is the whole bucket with its flags; or, of one that is a single large gradient, a part as
    it lies in memory, the first of them with the flags.
    """

    bucket: Bucket
    part: range
    length: int

    @property
    def has_flags(self) -> bool:
        """Whether flags lie behind the elements."""
        return self.part.start == 0

    @property
    def bytes(self) -> int:
        """How much memory it takes."""
        return self.length * self.bucket.dtype.itemsize

    def of(self, gradient: Tensor) -> Tensor:
        """The part of the only gradient, which has the strides of its parameter."""
        place = gradient.storage_offset() + self.part.start
        return gradient.as_strided([len(self.part)], [1], place)


def buckets(parameters: Sequence[Tensor], positions: Sequence[int]) -> Iterator[Bucket]:
    """The buckets for some of the parameters, the last of these first.

    Backwards nearly always fill gradients in that order.
    """
    rows: dict[torch.dtype, list[int]] = {}
    sizes: dict[torch.dtype, int] = {}
    for i in reversed(positions):
        parameter = parameters[i]
        size = parameter.numel() * parameter.element_size()
        dtype = parameter.dtype
        if rows.get(dtype) and sizes[dtype] + size > BUCKET_BYTES:
            yield _bucket(rows.pop(dtype), parameters)
        if dtype not in rows:
            rows[dtype], sizes[dtype] = [], 0
        rows[dtype].append(i)
        sizes[dtype] += size
    for row in rows.values():
        yield _bucket(row, parameters)


def _bucket(positions: Sequence[int], parameters: Sequence[Tensor]) -> Bucket:
    return Bucket(positions, [parameters[i] for i in positions])


def _like(parameter: Tensor) -> Tensor:
    """The strides that autograd gives its gradient."""
    return torch.empty_like(parameter.detach(), device="meta")
