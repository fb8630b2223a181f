"""A module and its replicas, as they are built; what a step has them follow is in `replicate`.

Replica 0 is the user's module. A replica on the root's device shares the root's parameter memory
and owns only its gradients; elsewhere it owns a copy. Its parameters are real leaf parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import compress
from operator import not_
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dp.parallel.links import Packing
from lightning_dp.parallel.replicas.arriving import Arriving
from lightning_dp.parallel.replicas.buffer_state import BufferState
from lightning_dp.parallel.replicas.buffers import CopiedBuffers, entries
from lightning_dp.parallel.replicas.changes import AttributeVersions
from lightning_dp.parallel.replicas.compiled import Compilations
from lightning_dp.parallel.replicas.limited_norm import LimitedNorms
from lightning_dp.parallel.replicas.replica import Replica
from lightning_dp.parallel.replicas.shared_writes import SharedWrites
from lightning_dp.parallel.replicas.structure import ModuleStructure, ReplicaRules
from lightning_dp.parallel.replicas.untracked_writes import SilentWrites
from lightning_dp.parallel.replicas.weights import WeightCopies
from lightning_dp.parallel.torch_private import at_end_of_backward


class BuiltReplicas:
    """A module and its replicas, one per device.

    The first of `modules` is the root itself, whose parameters lie on the first device. In
    `submodules` are all modules of every replica, at equal positions: one list until other replicas
    take their place. Before they do, `before_rebuild` is called with the parameters of all: what
    has accumulated on them must not go with them. If the root `takes_means` of floating buffers,
    steps may leave these different. What they compile is in `compiled`, and in `attributes` what
    the latest refresh has seen of the root's submodules. What `are_late` are parameters on their
    way, until `arrive`.
    """

    _has_links: bool  # of buffers
    shared_writes: SharedWrites | None
    are_late: Sequence[Arriving]
    arrive: Callable[[], None]
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
        self._buffer_state = BufferState(root, takes_means)
        self._build()

    def lose(self) -> None:
        """The next refresh makes new ones: somebody may still be at work with these."""
        self._are_lost = True

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
            self.are_late, self.arrive = weights.are_late, weights.arrive
            self._buffers = buffers = CopiedBuffers(structure.buffer_tables, structure.parameters)
            self._others = [
                Replica(structure, k, device, self._rules, weights.on(device), buffers)
                for k, device in enumerate(self._devices)
                if k > 0
            ]
            self.compiled = Compilations(self._root, len(self._devices))
            self.modules = [self._root, *(replica.module for replica in self._others)]
            self.submodules = [structure.modules, *(r.submodules for r in self._others)]
            self._parameters = [structure.parameters, *(r.parameters for r in self._others)]
            tables = [replica.buffers.tables for replica in self._others]
            self._buffer_state.follow(structure, self.submodules, tables)
            self._all_trained = self._has_links = False
            own = [r.weights if r.shares_memory else None for r in self._others]
            self.shared_writes = SharedWrites(structure.parameters, own) if any(own) else None
