"""Buffers: every replica has copies of its own, also on the root's device.

Some are trained. Of a leaf each replica has a leaf, whose gradients are summed as those of
parameters are. What is computed of others, and has a graph, each replica has as a function of the
root's: there is one graph behind it, and one backward goes through it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_not
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lightning_dp.parallel.links import Packing, can_be_packed, kind
from lightning_dp.parallel.torch_private import version

Table: TypeAlias = dict[str, Tensor | None]
StandIn: TypeAlias = Callable[[Tensor], Tensor | None]
"""What a replica has for one of the root's parameters; None for all else."""

_REQUIRES_GRAD = attrgetter("requires_grad")
_DTYPE = attrgetter("dtype")


class Buffers:
    """The buffers of one replica, in tables for its submodules.

    In `tensors` are its copies of what is `present` on the root, see `CopiedBuffers`; in `leaves`
    those of them that are trained. Each has memory of its own, for a step may resize it; what is
    written through `memory` leaves no trace.
    """

    def __init__(self, roots: Sequence[Table], device: torch.device, stand_in: StandIn) -> None:
        self.tables: list[Table] = [{} for _ in roots]
        self.versions: list[Any] | None = None  # of the root's, when they were copied last
        self.packing: Packing | None = None
        self.tensors: list[Tensor] = []
        self.memory: list[Tensor] = []
        self.leaves: list[Tensor] = []
        self.leaf_versions: list[int] = []  # of the root's, when they were copied last
        self._device = device
        self._stand_in = stand_in
        self._has_stand_ins = False
        self._in_tables: list[Tensor] = []  # in the places of the tensors
        self._bound: list[Tensor | None] = []
        self._plain: list[Tensor] = []
        self._memory: list[Any] = []

    def is_as_made(self, roots: list[Tensor | None], are_leaves: list[bool]) -> bool:
        """Whether nobody put another tensor in the place of a buffer, here or on the root.

        Nor gave one of these a graph, or other memory under the same object, as `resize_` does.
        """
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
        buffers = entries(roots)
        self._has_stand_ins = any(b is not None and id(b) not in own_of for b in buffers)
        self._in_tables = self.tensors
        self._bound = [*buffers, *entries(self.tables)]
        self._plain = list(filter(can_be_packed, self.tensors))
        self._memory = memory_of(self._plain)

    def compute_with(self, others: Mapping[int, Tensor]) -> None:
        """Puts tensors in the place of some, by their positions; elsewhere its own."""
        if not others and self._in_tables is self.tensors:
            return
        before, self._in_tables = self._in_tables, self.tensors
        if others:
            self._in_tables = [others.get(i, own) for i, own in enumerate(self.tensors)]
        pairs = zip(before, self._in_tables, strict=True)
        self._replace({id(old): new for old, new in pairs if old is not new})

    def replace_stand_ins(self, replaced: Mapping[int, Tensor]) -> None:
        """Puts tensors in the place of what stands for parameters, by the ids of these."""
        if self._has_stand_ins:
            self._replace(replaced)

    def _replace(self, replaced: Mapping[int, Tensor]) -> None:
        for table in self.tables:
            table.update({n: replaced[id(b)] for n, b in table.items() if id(b) in replaced})
        own = entries(self.tables)
        self._bound[-len(own) :] = own

    def copy_leaves(self, roots: Sequence[Tensor]) -> None:
        """Copies the root's leaves, where they have changed since the last such copy."""
        for i, (own, root) in enumerate(zip(self.leaves, roots, strict=True)):
            if self.leaf_versions[i] != version(root):
                own.copy_(root)
                self.leaf_versions[i] = version(root)

    def let_go(self) -> None:
        """Keeps no graph, its own or one that a step has left; what it has is made anew."""
        self.packing, self.versions, self._bound = None, None, []
        self._in_tables = self.tensors
        for table in self.tables:
            own = [(name, b) for name, b in table.items() if b is not None]
            table.update({name: b.detach() for name, b in own if b.grad_fn is not None})

    def are_in_place(self) -> bool:
        """Whether what is in the place of its tensors has their memory."""
        pairs = zip(self._in_tables, self.tensors, strict=True)
        return all(other is own or other.data_ptr() == own.data_ptr() for other, own in pairs)


class CopiedBuffers:
    """The buffers of all replicas: packed on the root's device, and sent.

    Each of the root's is `present` once, though modules may share it; those that are parameters as
    well are not. `trained` are those with gradients, by their positions there, and `leaves` those
    of them that accumulate these.
    """

    def __init__(self, roots: Sequence[Table], parameters: Sequence[nn.Parameter]) -> None:
        self.present: list[Tensor] = []
        self.trained: dict[int, Tensor] = {}
        self.leaves: list[Tensor] = []
        self._roots = roots
        self._parameters = set(map(id, parameters))
        self._entries: list[Tensor | None] = []
        self._are_leaves: list[bool] = []  # what is present
        self._plain: list[Tensor] = []
        self._alone: list[Tensor] = []
        self._replicas: list[Buffers] = []
        self._packing = Packing([])
        self._packed: list[Any] = []  # the forms that this is for

    def on(self, device: torch.device, stand_in: StandIn) -> Buffers:
        """Buffers for a replica on a device, with the root's values."""
        own = Buffers(self._roots, device, stand_in)
        self._replicas.append(own)
        self.refresh([own])
        return own

    def refresh(self, copies: Sequence[Buffers], *, everything: bool = False) -> None:
        """Copies the root's buffers to replicas for which one has changed, or to all of them."""
        roots = entries(self._roots)
        if self._look(roots):
            copies = self._replicas  # what is at equal positions has to correspond
        versions: list[Any] | None = None
        if not everything:
            versions = [*map(version_of, roots), *memory_of(self._plain)]
        if (forms := self._forms()) != self._packed:
            self._packing, self._packed = Packing(self.present), forms
        stale = [
            own
            for own in copies
            if versions is None or versions != own.versions or not self._is_as_made(own)
        ]
        for own in stale:
            if own.packing is not self._packing or not self._is_as_made(own):
                own.make(self._packing, self._roots, self.present)
            for i in self._packing.alone:
                own.tensors[i].copy_(self.present[i])
            own.versions = versions
            own.leaf_versions = list(map(version, self.leaves))
        self._packing.copy(self.present, [own.memory for own in stale])

    def will_replace_leaves(self) -> bool:
        """Whether a refresh will bind other leaves, on which nothing has accumulated."""
        if not self.leaves:
            return False
        roots, are_leaves = entries(self._roots), list(map(is_trained_leaf, self.present))
        return not all(own.is_as_made(roots, are_leaves) for own in self._replicas)

    def copy_leaves(self, copies: Sequence[Buffers]) -> None:
        """Copies the leaves to replicas, where they have changed since the last copy."""
        for own in copies if self.leaves else ():
            own.copy_leaves(self.leaves)

    def _look(self, roots: list[Tensor | None]) -> bool:
        """Sees what there is now; whether there are other leaves than before."""
        if len(roots) != len(self._entries) or any(map(is_not, roots, self._entries)):
            unique = {id(b): b for b in roots if b is not None and id(b) not in self._parameters}
            self._entries, self.present = roots, list(unique.values())
            self._plain = list(filter(can_be_packed, self.present))
            self._alone = [buffer for buffer in self.present if not can_be_packed(buffer)]
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

    def _forms(self) -> list[Any]:
        plain = self._plain
        forms = map(Tensor.size, plain), map(Tensor.stride, plain), map(_DTYPE, plain)
        return [*chain(*forms), *map(kind, self._alone)]

    def _is_as_made(self, own: Buffers) -> bool:
        return own.is_as_made(self._entries, self._are_leaves)


def entries(tables: Sequence[Table]) -> list[Tensor | None]:
    """All buffers of some modules' tables, in order."""
    return list(chain.from_iterable(map(dict.values, tables)))  # no frame for each


def _memory_like(buffer: Tensor, device: torch.device) -> Tensor:
    """Memory for a copy of a buffer, which is a leaf if the buffer is one that is trained."""
    if not can_be_packed(buffer):
        return buffer.detach().to(device, copy=True)
    own = torch.empty_like(buffer, device=device, requires_grad=False)
    return own.requires_grad_(is_trained_leaf(buffer))


def memory_of(plain: Sequence[Tensor]) -> list[Any]:
    """What changes with the memory of plain tensors that stay the same objects."""
    forms = map(Tensor.size, plain), map(Tensor.stride, plain)
    return [*map(Tensor.data_ptr, plain), *chain(*forms)]


def is_trained_leaf(tensor: Tensor) -> bool:
    """Whether gradients accumulate on a tensor."""
    return tensor.requires_grad and tensor.is_leaf


def version_of(buffer: Tensor | None) -> float:
    """Equal to what it was as long as the tensor is unchanged.

    Inference tensors do not count their changes; NaN is never equal to itself, but the same object
    in two lists is.
    """
    if buffer is None:
        return -1
    return float("nan") if buffer.is_inference() else version(buffer)
