"""The tensors of replicas: parameters, which are leaves, and buffers; what of them is sent when.

Parameters on the root's device are in the root's memory; elsewhere they are copies. Sent is what is
known to have changed: by version counters and data pointers; trained parameters after a step of an
optimizer, since fused ones leave no trace in the counters, or after a backward. Every replica has
buffers in memory of its own, also on the root's device, where a step may resize them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain, compress, count
from operator import attrgetter, ne
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_dp.parallel.comm import Packed, Packing, can_be_packed
from lightning_dp.parallel.torch_private import copy_to_each, is_in_backward, version

Table: TypeAlias = dict[str, Tensor | None]
_REQUIRES_GRAD = attrgetter("requires_grad")


def versions_of(tensors: Sequence[Tensor]) -> list[float]:
    """Numbers that grow when a tensor is written to; NaN, which equals nothing, has no counter."""
    try:
        return list(map(version, tensors))
    except RuntimeError:  # an inference tensor has none
        return [float("nan") if t.is_inference() else version(t) for t in tensors]


def pointers_of(tensors: Sequence[Tensor]) -> list[int]:
    """Where tensors are in memory."""
    try:
        return list(map(Tensor.data_ptr, tensors))
    except RuntimeError:  # a sparse tensor has none
        return [t.data_ptr() if t.layout is torch.strided else 0 for t in tensors]


# --- parameters


class ParameterState(NamedTuple):
    """What shows whether parameters are what they were."""

    pointers: list[int]
    versions: list[float]
    requires_grad: list[bool]


class ReplicaParameters:
    """The parameters of one replica, which are leaves."""

    def __init__(
        self, roots: Sequence[nn.Parameter], device: torch.device, packing: Packing
    ) -> None:
        # What shares the memory of an inference tensor could never be trained.
        self.shares_memory = all(p.device == device and not p.is_inference() for p in roots)
        self.packed: list[Packed] = []
        if self.shares_memory:
            self._memory = [p.detach() for p in roots]
        else:
            self.packed, self._memory = packing.memory(roots, device)
        self.parameters = list(map(_leaf, roots, self._memory))
        self.seen: ParameterState | None = None  # the root's, when they were followed last
        self.is_behind = False  # trained parameters of the root may have changed
        self._roots = roots

    def follow(self, state: ParameterState, *, trained: bool, frozen: bool) -> set[int]:
        """Follows the root, of which this is the state; returns positions that are to be copied.

        These are what has changed, and all that are trained or frozen where the caller says so.
        """
        seen, self.seen = self.seen or state, state
        bound = _differences(state.pointers, seen.pointers)
        written = _differences(state.versions, seen.versions)
        toggled = _differences(state.requires_grad, seen.requires_grad)
        for i in toggled:
            self.parameters[i].requires_grad_(state.requires_grad[i])
        if self.shares_memory:
            for i in range(len(self._roots)) if trained and frozen else bound:
                self.parameters[i].data = self._roots[i].data
            return set()
        # A backward through the values of before then raises autograd's error, as on one device.
        increment_version([self.parameters[i] for i in bound | written])
        for i in _differences(pointers_of(self.parameters), pointers_of(self._memory)):
            self.parameters[i].data = self._memory[i]  # a step has bound others on its replica
        stale = bound | written | toggled
        chosen = {True: trained, False: frozen}
        return stale.union(i for i, trains in enumerate(state.requires_grad) if chosen[trains])


class Parameters:
    """The parameters of all replicas: those elsewhere are packed on the root's device and sent."""

    def __init__(self, roots: Sequence[nn.Parameter]) -> None:
        self._roots = roots
        self.packing = Packing(roots)
        """How parameters, and gradients of their kinds, are packed when they travel."""
        self._elsewhere: list[ReplicaParameters] = []

    def on(self, device: torch.device) -> ReplicaParameters:
        """Parameters for a replica on a device, with the root's values."""
        own = ReplicaParameters(self._roots, device, self.packing)
        if not own.shares_memory:
            if not self._elsewhere:
                hook = register_optimizer_step_post_hook(partial(_after_step, weakref.ref(self)))
                weakref.finalize(self, hook.remove)
            self._elsewhere.append(own)
        self.refresh([own], everything=True)
        return own

    def have_other_kinds(self) -> bool:
        """Whether one has a shape or dtype for which replicas elsewhere have no memory."""
        return bool(self._elsewhere) and not self.packing.fits(self._roots)

    def expect_change(self) -> None:
        """Trained parameters may change without a trace."""
        for own in self._elsewhere:
            own.is_behind = True

    def refresh(
        self,
        replicas: Sequence[ReplicaParameters],
        *,
        everything: bool = False,
        frozen: bool = False,
    ) -> None:
        """Brings replicas up to date with the root's parameters, see `ReplicaParameters.follow`.

        Where one parameter of a bucket has changed, all of the bucket is sent. That leaves no trace
        in versions, so that graphs of earlier calls stay usable.
        """
        # Replicas in the root's memory see what is written there.
        versions = versions_of(self._roots) if self._elsewhere else []
        trains = list(map(_REQUIRES_GRAD, self._roots))
        state = ParameterState(pointers_of(self._roots), versions, trains)
        stale = []
        for own in replicas:
            # Where a checkpoint calls again, other threads are at work with the parameters.
            trained = everything or (own.is_behind and not is_in_backward())
            frozen = frozen or everything
            if trained or frozen or own.seen != state:
                own.is_behind = own.is_behind and not trained
                stale.append((own, own.follow(state, trained=trained, frozen=frozen)))
        if not any([positions for _, positions in stale]):
            return
        self.packing.send(
            self._roots,
            [
                [own.packed[j] for own, positions in stale if positions & bucket.positions]
                for j, bucket in enumerate(self.packing.buckets)
            ],
        )
        for own, positions in stale:
            for i in positions.intersection(self.packing.alone):
                own.parameters[i].data.copy_(self._roots[i].data)


def _after_step(parameters: Callable[[], Parameters | None], *_: Any) -> None:
    """Runs after a step of any optimizer."""
    living = parameters()
    if living is not None:
        living.expect_change()


def _differences(now: Sequence[Any], before: Sequence[Any]) -> set[int]:
    return set(compress(count(), map(ne, now, before)))


def _leaf(root: nn.Parameter, memory: Tensor) -> nn.Parameter:
    """A parameter of the root's class in some memory."""
    own = nn.Parameter(memory, requires_grad=root.requires_grad)
    if type(own) is nn.Parameter:
        own.__class__ = type(root)
    return own


# --- buffers


def entries(tables: Iterable[Table]) -> list[Tensor | None]:
    """All buffers in some modules' tables, in order."""
    return list(chain.from_iterable(map(dict.values, tables)))


class BufferState:
    """Buffers as they were at one moment: which ones, where in memory, how often written to."""

    def __init__(self, tables: Iterable[Table]) -> None:
        self._buffers = entries(tables)  # kept alive: no other tensor can get their ids
        present = [buffer for buffer in self._buffers if buffer is not None]
        self._marks = [*map(id, self._buffers), *pointers_of(present), *versions_of(present)]

    def differs(self, other: BufferState) -> bool:
        """Whether this is not the state at another moment."""
        return self._marks != other._marks


def copies_of(buffers: Sequence[Tensor]) -> list[Tensor]:
    """Copies on the same device, each in memory of its own, in few kernels."""
    copies = [
        torch.empty_like(buffer, requires_grad=False)
        if can_be_packed(buffer)
        else buffer.detach().clone()
        for buffer in buffers
    ]
    plain = list(map(can_be_packed, buffers))
    if any(plain):
        copy_to_each(list(compress(copies, plain)), list(compress(buffers, plain)))
    return copies
