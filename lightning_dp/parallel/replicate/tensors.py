"""The tensors of replicas: parameters, which are leaves, and buffers; what of them is sent when.

Parameters on the root's device are in the root's memory; elsewhere they are copies. Sent is what is
known to have changed: by version counters and data pointers; trained parameters after a step of an
optimizer, since fused ones leave no trace in the counters, or after a backward. Every replica has
buffers in memory of its own, also on the root's device, where a step may resize them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, compress, count
from operator import attrgetter, is_not, ne
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_dp.parallel.comm import Packed, Packing, can_be_packed, kind
from lightning_dp.parallel.torch_private import is_in_backward, parameter_table, version

Table: TypeAlias = dict[str, Tensor | None]
_REQUIRES_GRAD = attrgetter("requires_grad")


def version_of(tensor: Tensor | None) -> float:
    """A number that grows when the tensor is written to; an inference tensor has NaN.

    NaN is not equal to itself: such a tensor always seems to have changed.
    """
    if tensor is None:
        return -1
    return float("nan") if tensor.is_inference() else version(tensor)


def _versions(tensors: Sequence[Tensor]) -> list[float]:
    try:
        return list(map(version, tensors))
    except RuntimeError:  # an inference tensor has none
        return list(map(version_of, tensors))


def entries(tables: Sequence[Table]) -> list[Tensor | None]:
    """All buffers in some modules' tables, in order."""
    return list(chain.from_iterable(map(dict.values, tables)))


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
        self.shares_memory = all(p.device == device for p in roots)
        self.seen: ParameterState | None = None  # the root's, when they were followed last
        self.is_behind = False  # trained parameters of the root may have changed
        self._roots, self.device = roots, device
        if self.shares_memory:
            self._memory = [p.detach() for p in roots]
        else:
            self._take_memory(packing)
        self.parameters = list(map(_leaf, roots, self._memory))

    def _take_memory(self, packing: Packing) -> None:
        self.packed, self._memory = packing.memory(self._roots, self.device)
        self._pointers = list(map(Tensor.data_ptr, self._memory))

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
                root, own = self._roots[i], self.parameters[i]
                if root.data_ptr() != own.data_ptr() or kind(root) != kind(own):
                    own.data = root.data
            return set()
        increment_version([self.parameters[i] for i in bound | written])
        stale = bound | written | toggled
        chosen = {True: trained, False: frozen}
        return stale.union(i for i, trains in enumerate(state.requires_grad) if chosen[trains])

    def move(self, packing: Packing) -> None:
        """Takes other memory, for parameters of other shapes, dtypes or strides."""
        self._take_memory(packing)
        for own, memory in zip(self.parameters, self._memory, strict=True):
            own.data = memory

    def take_back(self) -> set[int]:
        """Binds parameters to their memory again where a step has bound them to other values."""
        bound = _differences(list(map(Tensor.data_ptr, self.parameters)), self._pointers)
        for i in bound:
            self.parameters[i].data = self._memory[i]
        return bound


class Parameters:
    """The parameters of all replicas: those elsewhere are packed on the root's device and sent."""

    def __init__(self, roots: Sequence[nn.Parameter]) -> None:
        self.roots = roots
        self.packing = Packing(roots)
        self._strides = list(map(_strides, roots))
        self._elsewhere: list[ReplicaParameters] = []
        self._ids = set(map(id, roots))

    def on(self, device: torch.device) -> ReplicaParameters:
        """Parameters for a replica on a device, with the root's values."""
        own = ReplicaParameters(self.roots, device, self.packing)
        if not own.shares_memory:
            if not self._elsewhere:
                hook = register_optimizer_step_post_hook(partial(_after_step, weakref.ref(self)))
                weakref.finalize(self, hook.remove)
            self._elsewhere.append(own)
        self.refresh([own], everything=True)
        return own

    def refresh(
        self, copies: Sequence[ReplicaParameters], *, everything: bool = False, frozen: bool = False
    ) -> None:
        """Brings replicas up to date with the root's parameters, see `ReplicaParameters.follow`."""
        pointers = list(map(Tensor.data_ptr, self.roots))
        trains = list(map(_REQUIRES_GRAD, self.roots))
        # Replicas in the root's memory see what is written there.
        versions = _versions(self.roots) if self._elsewhere else []
        stale = []
        for own in copies:
            state = ParameterState(pointers, [] if own.shares_memory else versions, trains)
            # Where a checkpoint calls again, other threads are at work with the parameters.
            is_late = own.is_behind and not is_in_backward()
            if everything or frozen or is_late or own.seen != state:
                positions = own.follow(
                    state, trained=is_late or everything, frozen=frozen or everything
                )
                own.is_behind = own.is_behind and not is_late
                if positions:
                    stale.append((own, positions))
        if stale:
            self._send(stale)

    def expect_change(self, optimizer: Optimizer | None = None) -> None:
        """Trained parameters may change without a trace: by a step of an optimizer, if given."""
        groups = [] if optimizer is None else optimizer.param_groups
        changed = (id(p) for group in groups for p in group["params"])
        if optimizer is None or not self._ids.isdisjoint(changed):
            for own in self._elsewhere:
                own.is_behind = True

    def _send(self, stale: list[tuple[ReplicaParameters, set[int]]]) -> None:
        """Copies parameters of these positions; where they are most of a bucket, all of it.

        The copy leaves no trace in versions, so that graphs of earlier calls stay usable.
        """
        strides = list(map(_strides, self.roots))
        if strides != self._strides or not self.packing.fits(self.roots):
            self.packing, self._strides = Packing(self.roots), strides
            for own in self._elsewhere:
                own.move(self.packing)
            stale = [(own, set(range(len(self.roots)))) for own in self._elsewhere]
        targets: list[list[Packed]] = [[] for _ in self.packing.buckets]
        for own, positions in stale:
            positions |= own.take_back()
            for j, bucket in enumerate(self.packing.buckets):
                if 2 * len(positions & bucket.positions) >= len(bucket.positions):
                    targets[j].append(own.packed[j])
                    positions -= bucket.positions
            for i in positions:
                own.parameters[i].data.copy_(self.roots[i].data)
        self.packing.send(self.roots, targets)


def _after_step(parameters: Callable[[], Parameters | None], optimizer: Optimizer, *_: Any) -> None:
    """Runs after a step of any optimizer."""
    living = parameters()
    if living is not None:
        living.expect_change(optimizer)


def _differences(now: Sequence[Any], before: Sequence[Any]) -> set[int]:
    return set(compress(count(), map(ne, now, before)))


def _strides(parameter: Tensor) -> tuple[int, ...]:
    return parameter.stride() if parameter.layout is torch.strided else ()


def _leaf(root: nn.Parameter, memory: Tensor) -> nn.Parameter:
    """A parameter of the root's class in some memory."""
    if memory.is_inference():  # which could never be trained
        storage, empty = memory.untyped_storage(), torch.empty(0, dtype=memory.dtype)
        empty = empty.to(memory.device)
        memory = empty.set_(storage, memory.storage_offset(), memory.shape, memory.stride())
    own = nn.Parameter(memory, requires_grad=root.requires_grad)
    if type(own) is nn.Parameter:
        own.__class__ = type(root)
    return own


# --- embeddings of limited norm

Limited = nn.Embedding | nn.EmbeddingBag


def limits_norms(module: nn.Module) -> bool:
    """Whether a forward of the module, or of a part of it, may write to its weights."""
    return any(isinstance(m, Limited) and m.max_norm is not None for m in module.modules())


class LimitedNorms:
    """Embeddings of limited norm (`max_norm=...`): a forward shortens the rows that it uses.

    A replica elsewhere shortens rows of its copy, and the root adopts the shorter ones. An
    embedding may get a limit at any time.
    """

    def __init__(self, modules: Sequence[nn.Module], parameters: Sequence[nn.Parameter]) -> None:
        places = {id(parameter): i for i, parameter in enumerate(parameters)}
        self._parameters = parameters
        self.modules: dict[int, Limited] = {
            places[id(parameter_table(module)["weight"])]: module
            for module in modules
            if isinstance(module, Limited) and parameter_table(module).get("weight") is not None
        }

    @property
    def positions(self) -> set[int]:
        """The places of limited weights among the parameters."""
        return {i for i, module in self.modules.items() if module.max_norm is not None}

    @torch.no_grad()
    def adopt(self, parameters: Sequence[nn.Parameter]) -> None:
        """Gives the root the rows that are shorter among a replica's parameters elsewhere.

        They are written without a trace: graphs that have saved the weight stay usable.
        """
        for i in self.positions:
            own, norm_type = self._parameters[i].data, self.modules[i].norm_type
            other = parameters[i].data.to(own.device)
            norms = [rows.norm(norm_type, dim=1, keepdim=True) for rows in (own, other)]
            own.copy_(torch.where(norms[1] < norms[0], other, own))


# --- buffers


class _Noted:
    """The buffers in some tables, as they were when somebody looked."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self.tables = tables
        self.note()

    def note(self) -> None:
        self.buffers = entries(self.tables)
        self.plain = [b for b in self.buffers if b is not None and can_be_packed(b)]
        self._memory = self._look()

    def differ(self) -> bool:
        """Whether one was bound anew, resized or given other memory."""
        now = entries(self.tables)
        is_bound = len(now) != len(self.buffers) or any(map(is_not, now, self.buffers))
        return is_bound or self._look() != self._memory

    def _look(self) -> list[Any]:
        forms = (
            map(Tensor.data_ptr, self.plain),
            map(kind, self.plain),
            map(Tensor.stride, self.plain),
        )
        return list(chain.from_iterable(forms))


class ReplicaBuffers:
    """The buffers of one replica, in `tables` for its modules; `tensors` has each of them once."""

    def __init__(self, tables: Sequence[Table], device: torch.device) -> None:
        self.tables: list[Table] = [{} for _ in tables]
        self.tensors: list[Tensor] = []
        self.memory: list[Tensor] = []  # written to without a trace
        self.seen: list[float] | None = None  # versions of the root's, when they were copied last
        self._device = device
        self._noted = _Noted(self.tables)

    def differ(self) -> bool:
        """Whether a step has bound, resized or connected one."""
        return self.seen is None or self._noted.differ()

    def make(
        self, roots: Sequence[Table], parts: dict[int, Any], present: Sequence[Tensor]
    ) -> None:
        """Takes new memory, for buffers as the root has them now; `parts` has tied parameters."""
        own: dict[int, Any] = {}
        for root in present:
            if can_be_packed(root):
                own[id(root)] = torch.empty_like(root, device=self._device, requires_grad=False)
            else:
                own[id(root)] = root.detach().to(self._device, copy=True)
        self.tensors = list(own.values())
        self.memory = [tensor.data for tensor in self.tensors]
        for table, root_table in zip(self.tables, roots, strict=True):
            table.clear()
            table.update({n: own.get(id(b), parts.get(id(b))) for n, b in root_table.items()})
        self._noted.note()

    def replace(self, replaced: dict[int, Tensor]) -> None:
        """Puts tensors in the place of what the tables have, by the ids of that."""
        for table in self.tables:
            table.update({n: replaced[id(b)] for n, b in table.items() if id(b) in replaced})
        self._noted.note()

    def drop_graphs(self) -> None:
        """Lets go of graphs that a step has left; the next refresh makes new buffers."""
        for table in self.tables:
            own = [(n, b) for n, b in table.items() if b is not None and b.grad_fn is not None]
            table.update((n, b.detach()) for n, b in own)
        self.seen = None


class Buffers:
    """The buffers of all replicas, packed on the root's device and sent.

    `present` has each of the root's once, though modules may share it, but for those that are
    parameters as well.
    """

    def __init__(self, tables: Sequence[Table], parameters: Sequence[nn.Parameter]) -> None:
        self._tables, self._parameters = tables, set(map(id, parameters))
        self._replicas: list[tuple[ReplicaBuffers, dict[int, Any]]] = []
        self._noted = _Noted(tables)
        self._note()

    def _note(self) -> None:
        self._noted.note()
        found = {id(b): b for b in self._noted.buffers if b is not None}
        self.present = [b for i, b in found.items() if i not in self._parameters]
        self._packing = Packing(self.present)

    def on(self, device: torch.device, parts: dict[int, Any]) -> ReplicaBuffers:
        """Buffers for a replica on a device, with the root's values."""
        own = ReplicaBuffers(self._tables, device)
        self._replicas.append((own, parts))
        self.refresh([own], everything=True)
        return own

    def refresh(
        self, copies: Sequence[ReplicaBuffers], *, everything: bool = False
    ) -> list[ReplicaBuffers]:
        """Copies the root's buffers to replicas where one has changed, or all of them.

        Returns those replicas that have other tensors than before.
        """
        if self._noted.differ():
            self._note()
            for own, _ in self._replicas:
                own.seen = None
        versions = _versions(self.present)
        made, stale = [], []
        for own, parts in self._replicas:
            if own in copies:
                if own.differ():
                    own.make(self._tables, parts, self.present)
                    made.append(own)
                elif not everything and own.seen == versions:
                    continue
                stale.append(own)
                own.seen = versions
        for own in stale:
            for i in self._packing.alone:
                own.tensors[i].copy_(self.present[i])
        self._packing.copy(self.present, [own.memory for own in stale])
        return made
