"""The replicas of a module, one per device: built once, kept, and refreshed before every step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from functools import partial
from itertools import compress, count
from operator import attrgetter, not_
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from lightning_dp.parallel.comm import Packing, gradients_on
from lightning_dp.parallel.replicate.compiled import Compilations, compiled_attributes
from lightning_dp.parallel.replicate.copier import Attributes, OwnGenerators
from lightning_dp.parallel.replicate.structure import ModuleStructure, ReplicaRules
from lightning_dp.parallel.replicate.tensors import (
    Buffers,
    LimitedNorms,
    Parameters,
    ReplicaParameters,
    entries,
)
from lightning_dp.parallel.torch_private import (
    at_end_of_backward,
    buffer_table,
    child_table,
    gradient_hooks,
    parameter_table,
    tables_as_attributes,
)

ParameterCopies: TypeAlias = Literal["changed", "frozen", "all"]
BufferCopies: TypeAlias = Literal["changed", "all", "read"]
_NONE: Set[int] = frozenset()
_GRAD, _REQUIRES_GRAD = attrgetter("grad"), attrgetter("requires_grad")


class Replicas:
    """A module and its replicas.

    `modules[0]` is the root itself, whose parameters lie on the first device. `submodules` has all
    modules of every replica, at equal positions; it is another list after replicas were replaced.
    `attributes` counts changes of the root's attributes. `before_rebuild` is called with the
    parameters of all replicas before others take their place, to save accumulated gradients.
    """

    def __init__(
        self,
        root: nn.Module,
        devices: Sequence[torch.device],
        rules: ReplicaRules | None = None,
        before_rebuild: Callable[[Sequence[Sequence[Tensor]]], None] = lambda _: None,
    ) -> None:
        self._root, self._devices = root, list(devices)
        self._rules = rules or ReplicaRules()
        self._before_rebuild = before_rebuild
        self._build()

    def _build(self) -> None:
        self._are_lost = self._has_failed = self._share = False
        with torch.inference_mode(False), torch.no_grad():
            self._structure = structure = ModuleStructure(self._root, self._rules)
            self.attributes, self.read_buffers = structure.attributes, structure.read_buffers
            limited = LimitedNorms(structure.modules, structure.parameters)
            self.limited = limited if limited.modules else None
            self._weights = Parameters(structure.parameters)
            self._buffers = Buffers(structure.buffer_tables, structure.parameters)
            self._others = [
                Replica(structure, k, device, self._rules, self._weights.on(device), self._buffers)
                for k, device in enumerate(self._devices)
                if k > 0
            ]
            self.compiled = Compilations(self._root, len(self._devices))
            self.modules = [self._root, *(replica.module for replica in self._others)]
            self.submodules = [structure.modules, *(r.submodules for r in self._others)]
            self._parameters = [structure.parameters, *(r.parameters for r in self._others)]

    def lose(self) -> None:
        """Has the next refresh make new replicas: a thread may still use these."""
        self._are_lost = True

    def fail(self) -> None:
        """Has the next refresh compare and copy everything: a step has ended with an error."""
        self._has_failed = True

    def expect_change(self) -> None:
        """Has the next refresh copy trained parameters, which are about to be updated."""
        self._weights.expect_change()

    @property
    def parameters(self) -> Sequence[Sequence[Tensor]]:
        """The parameters of every replica; equal positions correspond, tied ones appear once.

        Left out are replicas whose gradients are all in the root's, see `share_parameters`.
        """
        if not self._share:
            return self._parameters
        # A parameter may be in the graph of an earlier step, or a step may have bound a gradient.
        others = [
            replica.parameters
            for replica in self._others
            if not replica.shared or set(map(_GRAD, replica.parameters)) != {None}
        ]
        return [self._structure.parameters, *others]

    @property
    def root_parameters(self) -> Sequence[Tensor]:
        """The first of `parameters`."""
        return self._structure.parameters

    def parameters_of(self, k: int) -> Sequence[Tensor]:
        """The parameters that a backward of replica k fills: the root's where it shares them."""
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
        """Every replica's buffers, but for those of modules that are apart."""
        tables = [self._structure.buffer_tables, *(r.buffers.tables for r in self._others)]
        are_apart = [id(module) in self._structure.apart for module in self._structure.modules]
        return [entries(list(compress(own, map(not_, are_apart)))) for own in tables]

    @property
    def may_compile(self) -> bool:
        """Whether a call may compile something: replicas then run in order."""
        return self.compiled.are_known or any([r.attributes.compiles for r in self._others])

    def keep(self, k: int, position: int, name: str) -> None:
        """Lets a submodule of replica k keep what it has bound, until the root's is bound anew."""
        self._others[k - 1].attributes.keep(position, name)

    def refresh(
        self,
        active: Collection[int] | None = None,
        *,
        parameters: ParameterCopies = "changed",
        buffers: BufferCopies = "changed",
    ) -> None:
        """Brings replicas, all or those that are active in this step, up to date with the root.

        A root with other parameters or submodules than before gets new replicas. Copied are
        parameters that are known to have changed; "frozen", also those that are not trained, to
        which writing through `.data` leaves no trace. Of buffers "read" means all, but none if the
        forward only writes to them, as batch norm does in training.
        """
        others = [self._others[k - 1] for k in (active or range(len(self._devices))) if k > 0]
        has_failed, self._has_failed = self._has_failed, True  # until this has ended
        if has_failed:
            others, parameters, buffers = self._others, "all", "all"
        versions = self.attributes.look()
        # An inference tensor could never be trained, and evaluation often comes before training.
        with torch.inference_mode(False), torch.no_grad():
            if self._are_lost or self._structure.has_changed():
                # Tensors that a functional call puts in place of parameters accumulate nothing.
                if not self._are_lost and all(p.is_leaf for p in self._structure.parameters):
                    self._before_rebuild(self.parameters)
                self._build()
                others = []
            for replica in self._others if others else ():
                replica.attributes.follow(versions, everything=has_failed)
            if others:
                everything = parameters == "all"
                weights = [replica.weights for replica in others]
                frozen = parameters == "frozen"
                self._weights.refresh(weights, everything=everything, frozen=frozen)
                if buffers != "read" or everything or self._structure.reads_buffers():
                    own = [replica.buffers for replica in others]
                    everything = everything or buffers != "changed"
                    made = self._buffers.refresh(own, everything=everything)
                    for replica in others if made else ():
                        if replica.buffers in made:
                            replica.follow_buffers()
            for replica in self._others:
                if replica.generators.own:
                    replica.generators.follow(alone=bool(active and 0 not in active))
        self._has_failed = False

    def share_parameters(self, share: bool) -> None:
        """Has replicas on the root's device compute with the root's own parameters, or no longer.

        Their backwards then accumulate into the root's `.grad`, and there is nothing to sum. Called
        after every refresh; `share` only where replicas and their backwards run one after another.
        Shared are parameters that are trained, unless some have a limited norm.
        """
        positions: Set[int] = _NONE
        if share and not (self.limited and self.limited.positions):  # these a forward writes
            positions = set(compress(count(), map(_REQUIRES_GRAD, self._structure.parameters)))
        self._share = bool(positions)
        for device, replica in zip(self._devices[1:], self._others, strict=True):
            if not replica.weights.shares_memory:
                if torch.is_grad_enabled():
                    # Now, and not in the midst of a backward that has little memory left.
                    self.packing.sums.prepare([self._devices[0], device])
            elif replica.shared != positions:
                replica.share(positions)

    def connect(self, active: Iterable[int], after_backward: Callable[[], None]) -> None:
        """Has replicas compute with functions of the root's parameters, see `Replica.connect`.

        A backward through them calls `after_backward` at its end.
        """
        for k in filter(None, active):
            self._others[k - 1].connect(after_backward)

    def disconnect(self) -> None:
        """Has replicas compute with their own parameters again."""
        for replica in self._others:
            replica.disconnect()

    def refuse_trained_buffers(self) -> None:
        """Raises a ValueError about buffers that are trained: replicas would give them nothing.

        One that a step has computed, and left with its graph, is read as a value.
        """
        if any(map(_REQUIRES_GRAD, self._buffers.present)):
            buffers = self._root.named_buffers()
            names = [name for name, b in buffers if b.requires_grad and b.is_leaf]
            if names:
                raise ValueError(
                    f"Expected buffers without gradients, got {names}, of which a step on several "
                    "devices would lose those of all devices but the first. Make them parameters, "
                    'or use DataParallelStrategy(mode="forward").'
                )

    def adopt_rows(self, active: Iterable[int]) -> None:
        """Gives the root the rows of embeddings that a forward has shortened on replicas."""
        if self.limited is None:
            return
        for k in filter(None, active):
            if not self._others[k - 1].weights.shares_memory:
                self.limited.adopt(self._others[k - 1].parameters)


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
        self.shared: Set[int] = _NONE  # positions of parameters that are the root's own
        parts: dict[int, Any] = dict(zip(map(id, source.parameters), self.parameters, strict=True))
        parts.update((id(m), object.__new__(type(m))) for m in source.modules)
        parts.update((id(m), copy.deepcopy(m).to(device)) for m in source.scripted)
        self._parts = parts
        self._known_buffers: list[Tensor] = []  # of the root, which are among the parts
        self.buffers = buffers.on(device, parts)
        self._in_tables: list[Tensor] = [*self.parameters, *self.buffers.tensors]
        self.submodules: list[nn.Module] = [parts[id(m)] for m in source.modules]
        self.module = self.submodules[0]
        place = next((p.device for p in source.parameters), device)
        self.generators = OwnGenerators(k, place, device)
        self._tables: list[dict[str, Any]] = []
        kept: list[dict[str, Any]] = []
        for original, twin, table in zip(
            source.modules, self.submodules, self.buffers.tables, strict=True
        ):
            weights_of, children = (
                {name: parts.get(id(part), part) for name, part in tables(original).items()}
                for tables in (parameter_table, child_table)
            )
            self._tables.append(weights_of)
            own = buffer_table(original) if id(original) in source.staying else table
            kept.append(tables_as_attributes(weights_of, own, children))
            kept[-1].update(rules.own_attributes(original, twin, k, device))
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
        self._in_tables[len(self.parameters) :] = self.buffers.tensors
        self.attributes.replace(self._know_buffers())

    def _know_buffers(self) -> dict[int, Any]:
        """Forgets the root's former buffers; what stands for those that it has now, by their ids.

        They are kept alive: another object could get the id of one that is gone.
        """
        self._forget_buffers()
        pairs = zip(entries(self._source.buffer_tables), entries(self.buffers.tables), strict=True)
        own = [(root, own) for root, own in pairs if root is not None]
        self._known_buffers = [root for root, _ in own if id(root) not in self._parts]
        return {id(root): twin for root, twin in own}

    def _forget_buffers(self) -> None:
        for root in self._known_buffers:
            self._parts.pop(id(root), None)
        self._known_buffers = []

    def share(self, positions: Set[int]) -> None:
        """Computes with the root's own parameters of these positions, and no others."""
        self.shared = positions
        self._compute_with({i: self._source.parameters[i] for i in positions})

    def connect(self, on_backward: Callable[[], None]) -> None:
        """Computes with functions of the root's parameters, and of its buffers with gradients.

        A backward goes through them to the root, and calls `on_backward`. Without gradients the
        replica computes with its own parameters.
        """
        roots = [*self._source.parameters, *self._root_buffers.present]
        twins = [*self.parameters, *self.buffers.tensors]
        if torch.is_grad_enabled() and any(map(_REQUIRES_GRAD, roots)):
            tensors = broadcast(roots, twins, partial(at_end_of_backward, on_backward))
            self._compute_with(dict(enumerate(tensors)))
        elif torch.is_grad_enabled() or not self._stays_connected(twins):
            self._compute_with({})
        self.attributes.connect(connects=True)

    def disconnect(self) -> None:
        """Computes with its own parameters again, and lets go of graphs, also of steps' buffers.

        Python's garbage collector does not see through a graph that reaches a tensor of ours.
        """
        self._compute_with({})
        self.buffers.drop_graphs()
        self._forget_buffers()
        self.attributes.connect(connects=False)

    def _compute_with(self, tensors: dict[int, Tensor]) -> None:
        """Puts tensors in the place of parameters and buffers, by their positions; or its own."""
        twins = [*self.parameters, *self.buffers.tensors]
        before, self._in_tables = self._in_tables, [tensors.get(i, t) for i, t in enumerate(twins)]
        pairs = zip(before, self._in_tables, strict=True)
        replaced = {id(old): new for old, new in pairs if old is not new}
        if not replaced:
            return
        for table in self._tables:
            table.update({n: replaced[id(p)] for n, p in table.items() if id(p) in replaced})
        self.buffers.replace(replaced)
        ids = map(id, self._source.parameters)
        self.attributes.replace(dict(zip(ids, self._in_tables, strict=False)))

    def _stays_connected(self, twins: list[Tensor]) -> bool:
        """Whether the tensors of the latest call with gradients serve one without them as well.

        That call's backward may still recompute a part of it (reentrant checkpoints), which would
        otherwise find parameters that lead nowhere.
        """
        pairs = zip(self._in_tables, twins, strict=True)
        return all(other is own or other.data_ptr() == own.data_ptr() for other, own in pairs)


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
