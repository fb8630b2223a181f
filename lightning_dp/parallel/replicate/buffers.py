"""Buffers: every replica has copies in memory of its own, also on the root's device.

Some require gradients. Of a leaf each replica has a leaf, whose gradients are summed as those of
parameters are. Of a buffer with a graph each replica has a function of the root's, so that one
backward goes through the one graph behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_not
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lightning_dp.parallel.comm import Packing, can_be_packed
from lightning_dp.parallel.torch_private import version

Table: TypeAlias = dict[str, Tensor | None]
StandIn: TypeAlias = Callable[[Tensor], Tensor | None]
"""What a replica has in the place of one of the root's parameters; None for all else."""

_REQUIRES_GRAD = attrgetter("requires_grad")


class ReplicaBuffers:
    """The buffers of one replica, in `tables` for its modules.

    In `tensors` are its copies of the root's, see `Buffers.present`; `leaves` are those of them
    that require gradients. A step may resize any of them, so each has memory of its own.
    """

    def __init__(self, roots: Sequence[Table], device: torch.device, stand_in: StandIn) -> None:
        self.tables: list[Table] = [{} for _ in roots]
        self.versions: list[Any] | None = None  # of the root's, when they were copied last
        self.packing: Packing | None = None
        self.tensors: list[Tensor] = []
        self.memory: list[Tensor] = []  # written to without a trace
        self.leaves: list[Tensor] = []
        self._device = device
        self._stand_in = stand_in
        self._in_tables: list[Tensor] = []  # what stands in the tables for the tensors
        self._bound: list[Tensor | None] = []
        self._plain: list[Tensor] = []
        self._memory: list[Any] = []

    def is_as_made(self, roots: list[Tensor | None], are_leaves: list[bool]) -> bool:
        """Whether no buffer, here or on the root, was bound anew or got a graph or other memory."""
        are_bound_anew = any(map(is_not, [*roots, *entries(self.tables)], self._bound))
        return (
            not are_bound_anew
            and list(map(_REQUIRES_GRAD, self.tensors)) == are_leaves
            and memory_of(self._plain) == self._memory
        )

    def make(self, packing: Packing, roots: Sequence[Table], present: Sequence[Tensor]) -> None:
        """Takes new memory, for buffers as the root has them now."""
        self.packing = packing
        self.tensors = [_memory_like(buffer, self._device) for buffer in present]
        self.memory = [own.data for own in self.tensors]
        self.leaves = list(filter(_REQUIRES_GRAD, self.tensors))
        own_of = dict(zip(map(id, present), self.tensors, strict=True))
        for table, root in zip(self.tables, roots, strict=True):
            table.clear()
            for name, buffer in root.items():
                own = None if buffer is None else own_of.get(id(buffer))
                table[name] = self._stand_in(buffer) if own is None and buffer is not None else own
        self._in_tables = self.tensors
        self._bound = [*entries(roots), *entries(self.tables)]
        self._plain = list(filter(can_be_packed, self.tensors))
        self._memory = memory_of(self._plain)

    def compute_with(self, others: Mapping[int, Tensor]) -> None:
        """Puts tensors in the place of some, by their positions; elsewhere the replica's own."""
        if not others and self._in_tables is self.tensors:
            return
        before, self._in_tables = self._in_tables, self.tensors
        if others:
            self._in_tables = [others.get(i, own) for i, own in enumerate(self.tensors)]
        pairs = zip(before, self._in_tables, strict=True)
        self.replace({id(old): new for old, new in pairs if old is not new})

    def replace(self, replaced: Mapping[int, Tensor]) -> None:
        """Puts tensors in the place of what the tables have, by the ids of that."""
        for table in self.tables:
            table.update({n: replaced[id(b)] for n, b in table.items() if id(b) in replaced})
        own = entries(self.tables)
        self._bound[len(self._bound) - len(own) :] = own

    def let_go(self) -> None:
        """Drops graphs, its own or one that a step has left; the next refresh makes new buffers."""
        self.packing, self.versions, self._bound = None, None, []
        self._in_tables = self.tensors
        for table in self.tables:
            own = [(name, b) for name, b in table.items() if b is not None]
            table.update({name: b.detach() for name, b in own if b.grad_fn is not None})

    def are_in_place(self) -> bool:
        """Whether what stands in the tables for its tensors has their memory."""
        pairs = zip(self._in_tables, self.tensors, strict=True)
        return all(other is own or other.data_ptr() == own.data_ptr() for other, own in pairs)


class Buffers:
    """The buffers of all replicas, packed on the root's device and sent.

    `present` has each of the root's once, though modules may share it, but for those that are
    parameters as well. `trained` are those that require gradients, by their positions there, and
    `leaves` those of them that accumulate gradients.
    """

    def __init__(self, roots: Sequence[Table], parameters: Sequence[nn.Parameter]) -> None:
        self.present: list[Tensor] = []
        self.trained: dict[int, Tensor] = {}
        self.leaves: list[Tensor] = []
        self._roots = roots
        self._parameters = set(map(id, parameters))
        self._entries: list[Tensor | None] = []
        self._are_leaves: list[bool] = []  # of what is present
        self._plain: list[Tensor] = []
        self._replicas: list[ReplicaBuffers] = []
        self._packing = Packing([])
        self._strides: list[Any] = []  # that this is for

    def on(self, device: torch.device, stand_in: StandIn) -> ReplicaBuffers:
        """Buffers for a replica on a device, with the root's values."""
        own = ReplicaBuffers(self._roots, device, stand_in)
        self._replicas.append(own)
        self.refresh([own])
        return own

    def refresh(
        self, copies: Sequence[ReplicaBuffers], *, everything: bool = False
    ) -> list[ReplicaBuffers]:
        """Copies the root's buffers to replicas where one has changed, or all of them.

        Returns those replicas that have other tensors than before.
        """
        roots = entries(self._roots)
        if self._look(roots):
            copies = self._replicas  # leaves at equal positions have to correspond
        versions: list[Any] | None = None
        if not everything:
            versions = [*map(version_of, roots), *memory_of(self._plain)]
        strides = list(map(Tensor.stride, self._plain))
        if strides != self._strides or not self._packing.fits(self.present):
            self._packing, self._strides = Packing(self.present), strides
        stale = [
            own
            for own in copies
            if versions is None or versions != own.versions or not self._is_as_made(own)
        ]
        made = []
        for own in stale:
            if own.packing is not self._packing or not self._is_as_made(own):
                own.make(self._packing, self._roots, self.present)
                made.append(own)
            for i in self._packing.alone:
                own.tensors[i].copy_(self.present[i])
            own.versions = versions
        self._packing.copy(self.present, [own.memory for own in stale])
        return made

    def will_replace_leaves(self) -> bool:
        """Whether a refresh will bind other leaves, on which no gradient has accumulated."""
        if not self.leaves:
            return False
        roots, are_leaves = entries(self._roots), list(map(is_trained_leaf, self.present))
        return not all(own.is_as_made(roots, are_leaves) for own in self._replicas)

    def _look(self, roots: list[Tensor | None]) -> bool:
        """Notes the root's buffers; returns whether there are other leaves than before."""
        if len(roots) != len(self._entries) or any(map(is_not, roots, self._entries)):
            unique = {id(b): b for b in roots if b is not None and id(b) not in self._parameters}
            self._entries, self.present = roots, list(unique.values())
            self._plain = list(filter(can_be_packed, self.present))
        if not self.trained and not any(map(_REQUIRES_GRAD, self.present)):
            self._are_leaves = [False] * len(self.present)
            return False
        self.trained = {i: b for i, b in enumerate(self.present) if b.requires_grad}
        self._are_leaves = list(map(is_trained_leaf, self.present))
        leaves = list(filter(is_trained_leaf, self.present))
        if len(leaves) == len(self.leaves) and not any(map(is_not, leaves, self.leaves)):
            return False
        self.leaves = leaves
        return True

    def _is_as_made(self, own: ReplicaBuffers) -> bool:
        return own.is_as_made(self._entries, self._are_leaves)


def entries(tables: Sequence[Table]) -> list[Tensor | None]:
    """All buffers in some modules' tables, in order."""
    return list(chain.from_iterable(map(dict.values, tables)))


def _memory_like(buffer: Tensor, device: torch.device) -> Tensor:
    """Memory for a copy of a buffer; a leaf if the buffer is one that requires gradients."""
    if not can_be_packed(buffer):
        return buffer.detach().to(device, copy=True)
    own = torch.empty_like(buffer, device=device, requires_grad=False)
    return own.requires_grad_(is_trained_leaf(buffer))


def memory_of(plain: Sequence[Tensor]) -> list[Any]:
    """What changes with the memory of tensors that stay the same objects."""
    forms = map(Tensor.size, plain), map(Tensor.stride, plain)
    return [*map(Tensor.data_ptr, plain), *chain(*forms)]


def is_trained_leaf(tensor: Tensor) -> bool:
    """Whether gradients accumulate on a tensor."""
    return tensor.requires_grad and tensor.is_leaf


def version_of(tensor: Tensor | None) -> float:
    """A number that grows when the tensor is written to; an inference tensor has NaN.

    NaN is not equal to itself: such a tensor always seems to have changed.
    """
    if tensor is None:
        return -1
    try:
        return version(tensor)
    except RuntimeError:
        return float("nan")
