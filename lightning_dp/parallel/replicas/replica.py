"""One replica: the module as it stands on one device besides the root."""

from __future__ import annotations

import copy
from collections.abc import Callable, Set
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dp.parallel.replicas.attributes import AttributeMirror
from lightning_dp.parallel.replicas.broadcast import broadcast
from lightning_dp.parallel.replicas.buffers import CopiedBuffers
from lightning_dp.parallel.replicas.compiled import compiled_attributes
from lightning_dp.parallel.replicas.generators import OwnGenerators
from lightning_dp.parallel.replicas.structure import ModuleStructure, ReplicaRules
from lightning_dp.parallel.replicas.weights import Weights
from lightning_dp.parallel.torch_private import buffer_table


class Replica:
    """The module as it stands on one device other than the first entry."""

    def __init__(
        self,
        source: ModuleStructure,
        k: int,
        device: torch.device,
        rules: ReplicaRules,
        weights: Weights,
        buffers: CopiedBuffers,
    ) -> None:
        self._source = source
        self.weights, self._root_buffers = weights, buffers
        self.shares_memory = weights.shares_memory
        self.parameters = weights.parameters
        self.shared: Set[int] = frozenset()  # positions of those of which it has the root's own
        self._others: dict[int, Tensor] = {}  # what it computes with, by the ids of its own
        self._in_hooks: dict[int, Any] = {}
        self._known: list[Any] = []  # of which these are the ids
        twins = self._make_twins(device)
        self.buffers = buffers.on(device, partial(_stand_in, twins, self._others))
        place = next((p.device for p in source.parameters), device)
        self.generators = OwnGenerators(k, place, device)
        self._mirrors = [
            AttributeMirror(
                module,
                twins,
                self._in_hooks,
                self._others,
                buffer_table(module) if id(module) in source.staying else table,
                rules.own_attributes(module, twins[id(module)], k, device),
                place,
                device,
                self.generators,
            )
            for module, table in zip(source.modules, self.buffers.tables, strict=True)
        ]
        for original, mirror in zip(source.modules, self._mirrors, strict=True):
            mirror.own(compiled_attributes(original, twins[id(original)]))
        self.module: nn.Module = twins[id(source.root)]
        self.submodules: list[nn.Module] = [twins[id(m)] for m in source.modules]
        weights.can_be_late(self.submodules)
        self.attributes = [module.__dict__ for module in self.submodules]
        self.versions: list[int] = []
        self.counts: list[int] = []
        self.watched: list[AttributeMirror] = []
        self._note_attributes()

    def refresh(self, versions: list[int]) -> None:
        """Follows the root's attributes, of which these are the versions.

        It need not if these are the `versions` that it has followed, if its own `attributes` have
        the same `counts`, and if no mirror that has to be `watched` is stale.
        """
        for mirror, version in zip(self._mirrors, versions, strict=True):
            if mirror.version != version or mirror.is_stale():
                mirror.refresh()
                mirror.version = version
        self.versions = list(versions)
        self.counts = list(map(len, self.attributes))
        self.watched = [mirror for mirror in self._mirrors if mirror.has_to_be_watched]
        self._note_attributes()

    def share(self, positions: Set[int]) -> None:
        """Computes with the root's own parameters of these positions, and no others."""
        self.shared = positions
        self._compute_with({i: self._source.parameters[i] for i in positions})

    def keep(self, position: int, name: str) -> None:
        """Lets a submodule keep the attribute that it has now, until the root's is bound anew."""
        self._mirrors[position].keep(name)

    def stand_in(self, container: Any, own: Any) -> None:
        """Has hooks that know a container of the root's know this one in its place."""
        self._known.append(container)
        self._in_hooks[id(container)] = own
        for mirror in self._mirrors:
            mirror.translate_hooks()

    def connect(self, on_backward: Callable[[], None]) -> None:
        """Computes with functions of the root's parameters; without gradients, with its own.

        So it does with buffers that are trained.
        """
        trained, n = self._root_buffers.trained, len(self.parameters)
        if torch.is_grad_enabled() and (trained or any(p.requires_grad for p in self.parameters)):
            roots = [*self._source.parameters, *trained.values()]
            twins = [*self.parameters, *(self.buffers.tensors[i] for i in trained)]
            tensors = broadcast(roots, twins, on_backward)
            self._compute_with(dict(enumerate(tensors[:n])))
            self.buffers.compute_with(dict(zip(trained, tensors[n:], strict=True)))
        elif not self._stays_connected():
            self._compute_with({})
            self.buffers.compute_with({})
        for mirror in self._with_graphs:
            mirror.connect()

    def link_buffers(self, on_backward: Callable[[], None]) -> None:
        """Computes with functions of those of the root's buffers that are computed themselves."""
        trained = self._root_buffers.trained.items() if torch.is_grad_enabled() else ()
        computed = {i: buffer for i, buffer in trained if not buffer.is_leaf}
        twins = [self.buffers.tensors[i] for i in computed]
        tensors = broadcast(list(computed.values()), twins, on_backward)
        self.buffers.compute_with(dict(zip(computed, tensors, strict=True)))

    def disconnect(self) -> None:
        """Computes with its own parameters again, and lets go of the graph.

        A graph that reaches a tensor of ours, which holds the graph, is never freed: Python's
        collector does not see through it.
        """
        self._compute_with({})
        self.buffers.let_go()
        for mirror in self._with_graphs:
            mirror.disconnect()

    def _note_attributes(self) -> None:
        self._with_graphs = [mirror for mirror in self._mirrors if mirror.in_graphs]
        self.compiles = any([mirror.compiles for mirror in self._mirrors])

    def _compute_with(self, tensors: dict[int, Tensor]) -> None:
        """Puts tensors in the place of parameters, by their positions; elsewhere its own."""
        replaced = {}
        for i, own in enumerate(self.parameters):
            before, now = self._others.pop(id(own), own), tensors.get(i, own)
            if now is not own:
                self._others[id(own)] = now
            if now is not before:
                replaced[id(before)] = now
        for mirror in self._mirrors if replaced else ():
            mirror.replace(replaced)
        self.buffers.replace_stand_ins(replaced)

    def _stays_connected(self) -> bool:
        """Whether the tensors of the latest call with gradients serve one without them as well.

        That call's backward may still recompute a part of it (reentrant checkpoints), which would
        otherwise find parameters that lead nowhere.
        """
        if torch.is_grad_enabled():
            return False
        return self.buffers.are_in_place() and all(
            self._others.get(id(own), own).data_ptr() == own.data_ptr() for own in self.parameters
        )

    def _make_twins(self, device: torch.device) -> dict[int, Any]:
        """What stands for each parameter and module of the root, by the original's id."""
        source = self._source
        pairs = zip(source.parameters, self.parameters, strict=True)
        twins: dict[int, Any] = {id(original): twin for original, twin in pairs}
        twins.update({id(m): object.__new__(type(m)) for m in source.modules})
        twins.update({id(m): copy.deepcopy(m).to(device) for m in source.compiled})
        return twins


def _stand_in(twins: dict[int, Any], others: dict[int, Tensor], root: Tensor) -> Tensor | None:
    """What a replica computes with in the place of one of the root's parameters."""
    own = twins.get(id(root))
    return None if own is None else others.get(id(own), own)
