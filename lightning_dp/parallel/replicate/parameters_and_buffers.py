"""The tensors of replicas: parameters, which are leaves, and buffers; what of them is sent when.

Parameters on the root's device are in the root's memory; elsewhere they are copies. A parameter is
sent if its version counter or data pointer has changed. Trained parameters are also sent after
every optimizer step or backward, because fused optimizers do not raise the version counter. Every
replica has buffers in memory of its own, also on the root's device, where a step may resize them.
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


class Parameters:
    """The parameters of all replicas, which are leaves: `rows[k]` are those of replica k.

    On the root's device they are in the root's memory; elsewhere their memory is in buckets.
    """

    def __init__(self, roots: Sequence[nn.Parameter], devices: Sequence[torch.device]) -> None:
        self.packing = Packing(roots)
        self.rows: list[Sequence[nn.Parameter]] = [roots]
        # What shares the memory of an inference tensor could never be trained.
        self.share_memory = [
            all(p.device == device and not p.is_inference() for p in roots) for device in devices
        ]
        self._packed: dict[int, list[Packed]] = {}  # of replicas elsewhere
        self._memory: list[list[Tensor]] = [[]]
        for k, device in enumerate(devices[1:], 1):
            if self.share_memory[k]:
                memory = [p.detach() for p in roots]
            else:
                self._packed[k], memory = self.packing.memory(roots, device)
            self._memory.append(memory)
            self.rows.append(list(map(_leaf, roots, memory)))
        self._behind: set[int] = set()  # replicas for which trained parameters may have changed
        self._seen = [self._state()] * len(devices)  # the root's, when replicas were refreshed
        if self._packed:
            hook = register_optimizer_step_post_hook(partial(_after_step, weakref.ref(self)))
            weakref.finalize(self, hook.remove)
        self.refresh(range(1, len(devices)), everything=True)

    def _state(self) -> ParameterState:
        roots = self.rows[0]
        # Replicas in the root's memory see what is written there.
        versions = versions_of(roots) if self._packed else []
        return ParameterState(pointers_of(roots), versions, list(map(_REQUIRES_GRAD, roots)))

    def have_other_kinds(self) -> bool:
        """Whether one has a shape or dtype for which replicas elsewhere have no memory."""
        return bool(self._packed) and not self.packing.fits(self.rows[0])

    def expect_change(self) -> None:
        """Trained parameters may change without a trace."""
        self._behind.update(self._packed)

    def refresh(
        self, replicas: Iterable[int], *, everything: bool = False, frozen: bool = False
    ) -> None:
        """Brings replicas up to date: with what has changed, what is frozen, or with everything.

        Where one parameter of a bucket has changed, all of the bucket is sent. That leaves no trace
        in versions, so that graphs of earlier calls stay usable.
        """
        state, stale = self._state(), dict[int, set[int]]()
        for k in replicas:
            # Where a checkpoint calls again, other threads are at work with the parameters.
            trained = everything or (k in self._behind and not is_in_backward())
            if trained or (frozen and k in self._packed) or self._seen[k] != state:
                stale[k] = self._follow(k, state, trained=trained, frozen=frozen or everything)
        if any(stale.values()):
            buckets = self.packing.buckets
            targets = [
                [self._packed[k][j] for k, positions in stale.items() if positions & b.positions]
                for j, b in enumerate(buckets)
            ]
            self.packing.send(self.rows[0], targets)
            for k, positions in stale.items():
                for i in positions.intersection(self.packing.alone):
                    self.rows[k][i].data.copy_(self.rows[0][i].data)

    def _follow(self, k: int, state: ParameterState, *, trained: bool, frozen: bool) -> set[int]:
        """Follows the root, of which this is the state; returns positions that are to be copied."""
        parameters, seen, self._seen[k] = self.rows[k], self._seen[k], state
        bound = _differences(state.pointers, seen.pointers)
        written = _differences(state.versions, seen.versions)
        toggled = _differences(state.requires_grad, seen.requires_grad)
        for i in toggled:
            parameters[i].requires_grad_(state.requires_grad[i])
        if self.share_memory[k]:
            for i in range(len(parameters)) if trained else bound:
                parameters[i].data = self.rows[0][i].data
            return set()
        if trained:
            self._behind.discard(k)
        # A backward through the values of before then raises autograd's error, as on one device.
        increment_version([parameters[i] for i in bound | written])
        for i in _differences(pointers_of(parameters), pointers_of(self._memory[k])):
            parameters[i].data = self._memory[k][i]  # a step has bound others on its replica
        stale = bound | written | toggled
        chosen = {True: trained, False: frozen}
        return stale.union(i for i, trains in enumerate(state.requires_grad) if chosen[trains])


def _after_step(parameters: Callable[[], Parameters | None], *_: Any) -> None:
    """Runs after a step of any optimizer."""
    living = parameters()
    if living is not None:
        living.expect_change()


def _differences(now: Sequence[Any], before: Sequence[Any]) -> set[int]:
    return set(compress(count(), map(ne, now, before)))


def _leaf(root: nn.Parameter, memory: Tensor) -> nn.Parameter:
    """A parameter of the root's class in some memory."""
    leaf = nn.Parameter(memory, requires_grad=root.requires_grad)
    if type(leaf) is nn.Parameter:
        leaf.__class__ = type(root)
    return leaf


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
