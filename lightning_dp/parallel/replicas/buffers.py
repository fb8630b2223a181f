"""Buffers: every replica has copies of its own, also on the root's device."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import is_not
from typing import TypeAlias

import torch
from torch import Tensor

from lightning_dp.parallel.links import Packed, Packing
from lightning_dp.parallel.torch_private import version

Table: TypeAlias = dict[str, Tensor | None]


class Buffers:
    """The buffers of one replica, in tables for its submodules."""

    def __init__(self, roots: Sequence[Table], device: torch.device) -> None:
        self.tables: list[Table] = [{} for _ in roots]
        self.versions: list[float] | None = None  # of the root's, when they were copied last
        self.packing: Packing | None = None
        self.packed: list[Packed] = []
        self.tensors: list[Tensor] = []
        self._device = device
        self._bound: list[Tensor | None] = []

    def is_bound_anew(self, roots: list[Tensor | None]) -> bool:
        """Whether somebody put another tensor in the place of a buffer, here or on the root."""
        return any(map(is_not, [*roots, *entries(self.tables)], self._bound))

    def make(self, packing: Packing, roots: Sequence[Table]) -> None:
        """Takes new memory, for buffers as the root has them now."""
        self.packing = packing
        present = [buffer for buffer in entries(roots) if buffer is not None]
        self.packed, self.tensors = packing.memory(present, self._device)
        tensors = iter(self.tensors)
        for table, root in zip(self.tables, roots, strict=True):
            table.clear()
            table.update({n: None if b is None else next(tensors) for n, b in root.items()})
        self._bound = [*entries(roots), *entries(self.tables)]


class CopiedBuffers:
    """The buffers of all replicas: packed on the root's device, and sent."""

    def __init__(self, roots: Sequence[Table]) -> None:
        self._roots = roots
        self._packing = Packing([])

    def on(self, device: torch.device) -> Buffers:
        """Buffers for a replica on a device, with the root's values."""
        own = Buffers(self._roots, device)
        self.refresh([own])
        return own

    def refresh(self, copies: Sequence[Buffers], *, everything: bool = False) -> None:
        """Copies the root's buffers to replicas for which one has changed, or to all of them."""
        roots = entries(self._roots)
        versions = None if everything else list(map(version_of, roots))
        stale = [
            own
            for own in copies
            if versions is None or versions != own.versions or own.is_bound_anew(roots)
        ]
        present = [buffer for buffer in roots if buffer is not None]
        if stale and not self._packing.fits(present):
            self._packing = Packing(present)
        for own in stale:
            if own.packing is not self._packing or own.is_bound_anew(roots):
                own.make(self._packing, self._roots)
            for i in self._packing.alone:
                own.tensors[i].copy_(present[i])
            own.versions = versions
        self._packing.send(present, list(zip(*(own.packed for own in stale), strict=True)))


def entries(tables: Sequence[Table]) -> list[Tensor | None]:
    """All buffers of some modules' tables, in order."""
    return list(chain.from_iterable(table.values() for table in tables))


def version_of(buffer: Tensor | None) -> float:
    """Equal to what it was as long as the tensor is unchanged.

    Inference tensors do not count their changes; NaN is never equal to itself, but the same object
    in two lists is.
    """
    if buffer is None:
        return -1
    return float("nan") if buffer.is_inference() else version(buffer)
