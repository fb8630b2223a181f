"""One replica: the module as it stands on one device besides the root."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence, Set
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dp.parallel.comm import gradients_on
from lightning_dp.parallel.replicate.buffers import Buffers, entries
from lightning_dp.parallel.replicate.compiled import compiled_attributes
from lightning_dp.parallel.replicate.copier import Attributes, OwnGenerators
from lightning_dp.parallel.replicate.parameters import ReplicaParameters
from lightning_dp.parallel.replicate.structure import ModuleStructure, ReplicaRules
from lightning_dp.parallel.torch_private import (
    at_end_of_backward,
    buffer_table,
    child_table,
    gradient_hooks,
    parameter_table,
    tables_as_attributes,
)


class Replica:
    """Replica k, on a device other than the first entry of the devices.

    Its own parameters are `weights.parameters`. For a while it may compute with other tensors in
    their place: the root's own parameters, see `share`, or functions of these, see `connect`.
    """

    def __init__(
        self,
        source: ModuleStructure,
        k: int,
        device: torch.device,
        rules: ReplicaRules,
        weights: ReplicaParameters,
        buffers: Buffers,
    ) -> None:
        self._source, self.weights, self._root_buffers = source, weights, buffers
        self.parameters = weights.parameters
        self.shared: Set[int] = frozenset()  # positions of parameters that are the root's own
        self._in_tables: list[Tensor] = [*self.parameters]
        parts: dict[int, Any] = dict(zip(map(id, source.parameters), self.parameters, strict=True))
        parts.update((id(m), object.__new__(type(m))) for m in source.modules)
        parts.update((id(m), copy.deepcopy(m).to(device)) for m in source.scripted)
        self._parts = parts
        self._buffers: list[Tensor] = []  # of the root, which are among the parts
        self.buffers = buffers.on(device, lambda root: parts.get(id(root)))
        self.submodules: list[nn.Module] = [parts[id(m)] for m in source.modules]
        self.module = self.submodules[0]
        place = next((p.device for p in source.parameters), device)
        self.generators = OwnGenerators(k, place, device)
        self._tables = [
            {name: parts.get(id(p), p) for name, p in parameter_table(m).items()}
            for m in source.modules
        ]
        kept: list[dict[str, Any]] = []
        for original, twin, *own in zip(
            source.modules, self.submodules, self._tables, self.buffers.tables, strict=True
        ):
            if id(original) in source.staying:
                own[1] = buffer_table(original)
            children = {
                n: parts.get(id(child), child) for n, child in child_table(original).items()
            }
            tables = tables_as_attributes(own[0], own[1], children)
            kept.append({**tables, **rules.own_attributes(original, twin, k, device)})
        parts.update(self._know_buffers())
        kept += [{} for _ in source.owners[len(kept) :]]
        self.attributes = Attributes(
            [(owner, parts[id(owner)]) for owner in source.owners],
            parts,
            kept,
            source.attributes.versions,
            place,
            device,
            self.generators,
        )
        for own_kept, original, twin in zip(kept, source.modules, self.submodules, strict=False):
            compiled = compiled_attributes(original, twin)
            own_kept.update(compiled)
            vars(twin).update(compiled)

    def follow_buffers(self) -> None:
        """Has attributes that refer to buffers refer to the replica's new ones."""
        self.attributes.replace(self._know_buffers())

    def _know_buffers(self) -> dict[int, Any]:
        """Forgets the root's former buffers; what stands for those that it has now, by their ids.

        They are kept alive: another object could get the id of one that is gone.
        """
        self._forget_buffers()
        pairs = zip(entries(self._source.buffer_tables), entries(self.buffers.tables), strict=True)
        own = [(root, own) for root, own in pairs if root is not None]
        self._buffers = [root for root, _ in own if id(root) not in self._parts]
        return {id(root): twin for root, twin in own}

    def _forget_buffers(self) -> None:
        for root in self._buffers:
            self._parts.pop(id(root), None)
        self._buffers = []

    def share(self, positions: Set[int]) -> None:
        """Computes with the root's own parameters of these positions, and no others."""
        self.shared = positions
        self._compute_with({i: self._source.parameters[i] for i in positions})

    def connect(self, on_backward: Callable[[], None]) -> None:
        """Computes with functions of the root's parameters, and of its buffers with gradients.

        A backward goes through them to the root, and calls `on_backward`. Without gradients the
        replica computes with its own parameters.
        """
        trained, n = self._root_buffers.trained, len(self.parameters)
        if torch.is_grad_enabled() and (trained or any(p.requires_grad for p in self.parameters)):
            roots = [*self._source.parameters, *trained.values()]
            twins = [*self.parameters, *(self.buffers.tensors[i] for i in trained)]
            tensors = broadcast(roots, twins, partial(at_end_of_backward, on_backward))
            self._compute_with(dict(enumerate(tensors[:n])))
            self.buffers.compute_with(dict(zip(trained, tensors[n:], strict=True)))
        elif not self._stays_connected():
            self._compute_with({})
            self.buffers.compute_with({})
        self.attributes.connect(connects=True)

    def link_buffers(self, on_backward: Callable[[], None]) -> None:
        """Computes with functions of those of the root's buffers that have a graph."""
        trained = self._root_buffers.trained.items() if torch.is_grad_enabled() else ()
        computed = {i: buffer for i, buffer in trained if not buffer.is_leaf}
        twins = [self.buffers.tensors[i] for i in computed]
        tensors = broadcast(list(computed.values()), twins, on_backward)
        self.buffers.compute_with(dict(zip(computed, tensors, strict=True)))

    def disconnect(self) -> None:
        """Computes with its own parameters again, and lets go of the graph.

        Python's garbage collector does not see through a graph that reaches a tensor of ours.
        """
        self._compute_with({})
        self.buffers.let_go()
        self._forget_buffers()
        self.attributes.connect(connects=False)

    def _compute_with(self, tensors: dict[int, Tensor]) -> None:
        """Puts tensors in the place of parameters, by their positions; elsewhere its own."""
        before = self._in_tables
        self._in_tables = [tensors.get(i, own) for i, own in enumerate(self.parameters)]
        changed = [old is not new for old, new in zip(before, self._in_tables, strict=True)]
        if not any(changed):
            return
        pairs = compress(zip(before, self._in_tables, strict=True), changed)
        replaced = {id(old): new for old, new in pairs}
        for table in self._tables:
            table.update({n: replaced[id(p)] for n, p in table.items() if id(p) in replaced})
        self.buffers.replace(replaced)
        ids = map(id, self._source.parameters)
        self.attributes.replace(dict(zip(ids, self._in_tables, strict=True)))

    def _stays_connected(self) -> bool:
        """Whether the tensors of the latest call with gradients serve one without them as well.

        That call's backward may still recompute a part of it (reentrant checkpoints), which would
        otherwise find parameters that lead nowhere.
        """
        if torch.is_grad_enabled():
            return False
        pairs = zip(self._in_tables, self.parameters, strict=True)
        return self.buffers.are_in_place() and all(
            other.data_ptr() == own.data_ptr() for other, own in pairs
        )


def broadcast(
    roots: Sequence[Tensor], twins: Sequence[Tensor], on_backward: Callable[[], None]
) -> list[Tensor]:
    """The root's tensors inside a replica's graph: functions of them in the twins' memory.

    What requires no gradient is its twin. Any backward, `torch.autograd.grad` and second
    derivatives reach the root's tensors, whose hooks see one sum; each calls `on_backward`.
    """
    tensors: list[Tensor] = list(twins)
    for group in _groups(roots):
        aliases = _aliases([twins[i] for i in group], on_backward, *(roots[i] for i in group))
        for i, alias in zip(group, aliases, strict=True):
            # Tensors with a graph refuse to be copied; what a forward copies are the parameters.
            vars(alias).update(vars(twins[i]), __deepcopy__=twins[i].__deepcopy__)
            tensors[i] = alias
    return tensors


def _groups(roots: Sequence[Tensor]) -> list[list[int]]:
    """Which trained tensors share a node: all, but those with hooks or a graph stand alone.

    A node hands None to the tensors that a step did not use. Autograd passes that over where it
    accumulates; but it calls hooks with it, and it uses up the graph of a computed tensor.
    """
    trained = {i: root for i, root in enumerate(roots) if root.requires_grad}
    alone = {i for i, root in trained.items() if gradient_hooks(root) or not root.is_leaf}
    together = [i for i in trained if i not in alone]
    return [*([i] for i in alone), *([together] if together else [])]


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, twins: list[Tensor], on_backward: Callable[[], None], *roots: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # None stays None: AdamW moves parameters that get zeros
        ctx.device, ctx.on_backward = roots[0].device, on_backward
        return tuple(twin.detach() for twin in twins)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        ctx.on_backward()
        return None, None, *gradients_on(ctx.device, list(gradients))


_aliases: Callable[..., tuple[Tensor, ...]] = _Broadcast.apply
