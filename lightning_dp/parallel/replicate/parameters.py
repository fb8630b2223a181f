"""The parameters of replicas: in the root's memory or, on another device, copies that are sent.

Sent is what is known to have changed: by version counters and data pointers; trained parameters
after a step of an optimizer, since fused ones leave no trace in the counters, or after a backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress, count
from operator import attrgetter, ne
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_dp.parallel.comm import Packed, Packing, kind
from lightning_dp.parallel.replicate.buffers import version_of
from lightning_dp.parallel.torch_private import is_in_backward, parameter_table, version

_REQUIRES_GRAD = attrgetter("requires_grad")


class ParameterState(NamedTuple):
    """What shows whether parameters are what they were."""

    pointers: list[int]
    versions: list[float]
    requires_grad: list[bool]

    @classmethod
    def of(cls, parameters: Sequence[nn.Parameter]) -> ParameterState:
        """Of these as they are now."""
        pointers = list(map(Tensor.data_ptr, parameters))
        try:
            versions: list[float] = list(map(version, parameters))
        except RuntimeError:  # an inference tensor has none
            versions = list(map(version_of, parameters))
        return cls(pointers, versions, list(map(_REQUIRES_GRAD, parameters)))


class ReplicaParameters:
    """The parameters of one replica, which are leaves."""

    def __init__(
        self, roots: Sequence[nn.Parameter], device: torch.device, packing: Packing
    ) -> None:
        self.shares_memory = all(p.device == device for p in roots)
        self.seen: ParameterState | None = None  # the root's, when they were followed last
        self.is_behind = self.is_late = False  # trained parameters of the root may have changed
        self._roots, self.device = roots, device
        if self.shares_memory:
            self._memory = [p.detach() for p in roots]
        else:
            self._take_memory(packing)
        self.parameters = list(map(_leaf, roots, self._memory))

    def _take_memory(self, packing: Packing) -> None:
        self.packed, self._memory = packing.memory(self._roots, self.device)
        self._pointers = list(map(Tensor.data_ptr, self._memory))

    def follow(self, state: ParameterState, *, everything: bool, frozen: bool) -> set[int]:
        """Follows the root, of which this is the state; returns positions that are to be copied.

        These are `everything`, or what has changed, with `frozen` also what is not trained.
        """
        seen, self.seen = self.seen or state, state
        bound, written, toggled = set[int](), set[int](), set[int]()
        if state != seen:
            bound = _differences(state.pointers, seen.pointers)
            written = _differences(state.versions, seen.versions)
            toggled = _differences(state.requires_grad, seen.requires_grad)
        for i in toggled:
            self.parameters[i].requires_grad_(state.requires_grad[i])
        if self.shares_memory:
            for i in range(len(self._roots)) if everything else bound:
                root, own = self._roots[i], self.parameters[i]
                if root.data_ptr() != own.data_ptr() or kind(root) != kind(own):
                    own.data = root.data
            return set()
        increment_version([self.parameters[i] for i in bound | written])
        stale = bound | written | toggled
        chosen = {True: self.is_late or everything, False: frozen or everything}
        self.is_behind = self.is_behind and not self.is_late
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

    def copy(self, positions: set[int]) -> None:
        """Copies some of the root's, one by one."""
        for i in positions:
            self.parameters[i].data.copy_(self._roots[i].data)


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
        state, stale = ParameterState.of(self.roots), []
        bound = state._replace(versions=[])
        for own in copies:
            now = bound if own.shares_memory else state
            # Where a checkpoint calls again, other threads are at work with the parameters.
            own.is_late = own.is_behind and not is_in_backward()
            if everything or frozen or own.is_late or own.seen != now:
                positions = own.follow(now, everything=everything, frozen=frozen)
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
            own.copy(positions)
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
