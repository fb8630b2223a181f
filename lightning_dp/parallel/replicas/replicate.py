"""Replicate: one module on every device. Built once, kept, and refreshed where the root changed.

Replica 0 is the user's module. A replica on the root's device shares the root's parameter memory
and owns only its gradients; elsewhere it owns a copy. Its parameters are real leaf parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import compress
from operator import attrgetter, not_
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from lightning_dp.parallel.links import Packing
from lightning_dp.parallel.replicas.buffer_state import BufferState
from lightning_dp.parallel.replicas.buffers import CopiedBuffers, entries
from lightning_dp.parallel.replicas.compiled import Compilations
from lightning_dp.parallel.replicas.limited_norm import LimitedNorms
from lightning_dp.parallel.replicas.replica import Replica
from lightning_dp.parallel.replicas.shared_writes import SharedWrites
from lightning_dp.parallel.replicas.structure import (
    AttributeVersions,
    ModuleStructure,
    ReplicaRules,
)
from lightning_dp.parallel.replicas.untracked_writes import SilentWrites
from lightning_dp.parallel.replicas.weights import ParameterState, Sharing, WeightCopies
from lightning_dp.parallel.torch_private import at_end_of_backward

ParameterCopies: TypeAlias = Literal["changed", "trained", "all"]
BufferCopies: TypeAlias = Literal["changed", "all", "read"]
_GRAD = attrgetter("grad")


class Replicas:
    """A module and its replicas, one per device.

    The first of `modules` is the root itself, whose parameters lie on the first device. In
    `submodules` are all modules of every replica, at equal positions: one list until other replicas
    take their place. Before they do, `before_rebuild` is called with the parameters of all: what
    has accumulated on them must not go with them. If the root `takes_means` of floating buffers,
    steps may leave these different. What they compile is in `compiled`, and in `attributes` what
    the latest refresh has seen of the root's submodules.
    """

    _has_links: bool  # of buffers
    shared_writes: SharedWrites | None
    attributes: AttributeVersions
    modules: list[nn.Module]
    submodules: list[list[nn.Module]]

    def __init__(
        self,
        root: nn.Module,
        devices: Sequence[torch.device],
        rules: ReplicaRules | None = None,
        before_rebuild: Callable[[Sequence[Sequence[Tensor]]], None] = lambda _: None,
        takes_means: bool = False,
    ) -> None:
        self._root, self._devices = root, list(devices)
        self._rules = rules or ReplicaRules()
        self._before_rebuild = before_rebuild
        self._sharing = Sharing()
        self._followed: ParameterState | None = None  # by a refresh, of which the step goes on
        self._buffer_state = BufferState(root, takes_means)
        self._build()

    def lose(self) -> None:
        """The next refresh makes new ones: somebody may still be at work with these."""
        self._are_lost = True

    @property
    def parameters(self) -> Sequence[Sequence[Tensor]]:
        """The parameters of every replica; equal positions correspond, tied ones appear once.

        With them those buffers that are trained, and leaves. Left out are replicas whose gradients
        are all in the root's, see `share_parameters`.
        """
        if self._buffers.leaves:
            leaves = [self._buffers.leaves, *(replica.buffers.leaves for replica in self._others)]
            return [[*own, *more] for own, more in zip(self._parameters, leaves, strict=True)]
        if not self._sharing.positions:
            return self._parameters
        # They may be in the graph of an earlier step, or a step may have bound gradients there.
        others = [
            replica.parameters
            for replica in self._others
            if not replica.shared or set(map(_GRAD, replica.parameters)) != {None}
        ]
        return [self._structure.parameters, *others]

    @property
    def root_parameters(self) -> Sequence[Tensor]:
        """The first of `parameters`, without a look at the others."""
        own = self._structure.parameters
        return [*own, *self._buffers.leaves] if self._buffers.leaves else own

    def parameters_of(self, k: int) -> Sequence[Tensor]:
        """Those that a backward of replica k fills: the root's, where it has the root's own."""
        return self._parameters[0 if k > 0 and self._others[k - 1].shared else k]

    @property
    def packing(self) -> Packing:
        """How parameters, and gradients of their kinds, are packed when they travel."""
        return self._weights.packing

    @property
    def root_buffers(self) -> list[Tensor | None]:
        """The root's buffers."""
        return entries(self._structure.buffer_tables)

    @property
    def buffers_of_steps(self) -> list[list[Tensor | None]]:
        """Those of them that are left as a step has left them: what is apart has its own rules."""
        tables = [self._structure.buffer_tables, *(r.buffers.tables for r in self._others)]
        are_apart = [id(module) in self._structure.apart for module in self._structure.modules]
        return [entries(list(compress(own, map(not_, are_apart)))) for own in tables]

    def refresh(
        self,
        active: Iterable[int] | None = None,
        *,
        parameters: ParameterCopies = "changed",
        buffers: BufferCopies = "changed",
    ) -> None:
        """Brings replicas up to date with the root.

        Plain attributes (`training`, hooks, a dropout rate) always follow the root. Parameters
        and buffers are copied where the root's changed since the replica saw them. A root with
        other parameters or submodules than before gets new replicas.

        Parameters that are copied: `"changed"`, those that look changed. Writing through `.data`
        leaves no trace: `"trained"` copies those that are trained too, `"all"` buffers as well.
        Those that are not trained `SilentWrites` watches.

        Buffers that are copied: `"changed"`, those that look changed. `"all"`, since batch norm
        writes to its buffers and leaves no trace. `"read"`, all as well, but none if a forward
        writes to them without reading them, as batch norm does in training.
        """
        others = [self._others[k - 1] for k in (active or range(len(self._devices))) if k > 0]
        self._followed = None
        self.attributes.look()
        # An inference tensor could never be trained, and evaluation often comes before training.
        with torch.inference_mode(False), torch.no_grad():
            if self._are_lost:
                self._build()
            elif self._structure.has_changed():
                # The weights of a functional call accumulate nothing.
                if all(parameter.is_leaf for parameter in self._structure.parameters):
                    self._before_rebuild(self.parameters)
                self._build()
            elif others:
                self._follow(others, parameters)
                if parameters == "all" or buffers != "read" or self._structure.reads_buffers():
                    if self._buffers.will_replace_leaves():
                        self._before_rebuild(self.parameters)
                    everything = parameters == "all" or buffers != "changed"
                    self._buffers.refresh([r.buffers for r in others], everything=everything)

    def _follow(self, others: list[Replica], parameters: ParameterCopies) -> None:
        """Has replicas follow the root, but for the buffers."""
        for replica in others:
            replica.refresh(self.attributes.versions)
        versioned = self._silent is not None or bool(self._sharing.positions)
        self._followed = state = ParameterState.of(self._structure.parameters, versions=versioned)
        self._all_trained = all(state.requires_grad)
        limited = set() if self.limited is None else self.limited.positions
        silent = limited | (set() if self._silent is None else self._silent.look())
        self._weights.refresh([r.weights for r in others], state, parameters, silent)
        if self.shared_writes is not None and self.shared_writes.apart:
            self.shared_writes.refresh()

    def refresh_parameters(self, active: Iterable[int]) -> None:
        """Brings the parameters of some replicas up to date, in the middle of a step.

        Attributes and buffers stay as the step has left them on each replica.
        """
        with torch.inference_mode(False), torch.no_grad():
            state = ParameterState.of(self._structure.parameters, versions=self._silent is not None)
            others = [self._others[k - 1] for k in filter(None, active)]
            self._weights.refresh([replica.weights for replica in others], state)
            self._buffers.copy_leaves([replica.buffers for replica in others])
            if self.shared_writes is not None and self.shared_writes.apart:
                self.shared_writes.refresh()

    def share_parameters(self, share: bool) -> None:
        """Lets replicas on the root's device compute with the root's own parameters, or no longer.

        Their backwards then accumulate into the root's `.grad`: there is nothing to sum. To be said
        after every refresh, and only where replicas and their backwards run one after another.
        Shared are those that are trained, until a step does something to one: see `check_shared`.
        """
        share, roots = share and not self._buffers.leaves, self._structure.parameters
        positions = self._sharing.choose(roots, share, self._followed, self.limited)
        for device, replica in zip(self._devices[1:], self._others, strict=True):
            if not replica.shares_memory:
                # Now, and not in the midst of a backward that has little memory left.
                self.packing.sums.prepare([self._devices[0], device])
            elif replica.shared is not positions:
                replica.share(positions)

    def check_shared(self) -> None:
        """Shares nothing from now on if the step has written to, bound or frozen a parameter.

        To be called before every replica but the first one that runs in a step. What that one, the
        root, does to its parameters the others do to theirs: so these have to be their own.
        """
        before, roots = self._sharing.before, self._structure.parameters
        if before is not None and before != ParameterState.of(roots, versions=True):
            self._sharing.end()
            self.share_parameters(False)

    def noticed(self, active: Sequence[int]) -> AbstractContextManager[None]:
        """What surrounds a training step: writes to buffers and shared weights are noticed."""
        state, shared = self._buffer_state, self.shared_writes
        buffers = state.noticed(active) if state.positions else nullcontext()
        if shared is None or (self._all_trained and not shared.trained.is_looking):
            return buffers
        limited = set() if self.limited is None else self.limited.positions
        return shared.noticed(active, buffers, limited)

    def adopt_rows(self, active: Iterable[int]) -> None:
        """Gives the root the rows of embeddings that a forward has shortened on replicas."""
        if self.limited is None:
            return
        for k in active:
            if k > 0 and not self._others[k - 1].shares_memory:
                self.limited.adopt(self._others[k - 1].parameters)

    def keep(self, k: int, position: int, name: str) -> None:
        """Lets a submodule of replica k keep what it has bound, until the root's is bound anew."""
        self._others[k - 1].keep(position, name)

    def stand_in(self, container: Any, copies: Sequence[Any]) -> None:
        """Has hooks that know a container of the root's know these on the other replicas."""
        for replica, own in zip(self._others, copies, strict=True):
            replica.stand_in(container, own)

    def connect(self, active: Iterable[int], after_backward: Callable[[], None]) -> None:
        """Makes the replicas compute with functions of the root's parameters, until told otherwise.

        A backward then goes through them to the root's parameters, and calls `after_backward` at
        its end. Without gradients, the replicas compute with their own parameters again.
        """
        for k in filter(None, active):
            self._others[k - 1].connect(partial(at_end_of_backward, after_backward))

    def link_buffers(
        self, active: Iterable[int], on_backward: Callable[[list[str]], None]
    ) -> list[str]:
        """Makes the replicas compute with functions of those buffers that the root has computed.

        Their names are returned. A backward of all replicas, at once, goes on in the graph that
        these have; on the way it calls `on_backward` with the names. A leaf needs no such function.
        """
        if not self._buffers.trained and not self._has_links:
            return []
        self._has_links = torch.is_grad_enabled()
        computed = {id(b) for b in self._buffers.trained.values() if not b.is_leaf}
        found = self._root.named_buffers() if self._has_links else ()
        names = [name for name, buffer in found if id(buffer) in computed]
        for k in filter(None, active):
            self._others[k - 1].link_buffers(partial(on_backward, names))
        return names

    def disconnect(self) -> None:
        """Makes the replicas compute with their own parameters again."""
        for replica in self._others:
            replica.disconnect()

    def _build(self) -> None:
        self._are_lost = False
        with torch.inference_mode(False), torch.no_grad():
            self._structure = structure = ModuleStructure(self._root, self._rules)
            self.attributes, self.read_buffers = structure.attributes, structure.read_buffers
            limited = LimitedNorms(structure.modules, structure.parameters)
            self.limited = limited if limited.modules else None
            differ = len(set(self._devices)) > 1
            self._silent = SilentWrites(structure.parameters) if differ else None
            self._weights = weights = WeightCopies(structure.parameters)
            self._buffers = buffers = CopiedBuffers(structure.buffer_tables, structure.parameters)
            self._others = [
                Replica(structure, k, device, self._rules, weights.on(device), buffers)
                for k, device in enumerate(self._devices)
                if k > 0
            ]
            self.compiled = Compilations(self._root, self._others)
            self.modules = [self._root, *(replica.module for replica in self._others)]
            self.submodules = [structure.modules, *(r.submodules for r in self._others)]
            self._parameters = [structure.parameters, *(r.parameters for r in self._others)]
            tables = [replica.buffers.tables for replica in self._others]
            self._buffer_state.follow(structure, self.submodules, tables)
            self._all_trained = self._has_links = False
            own = [r.weights if r.shares_memory else None for r in self._others]
            self.shared_writes = SharedWrites(structure.parameters, own) if any(own) else None
