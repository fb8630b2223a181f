"""The replicas of a module, one per device: built once, kept, and refreshed before every step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence, Set
from functools import partial
from itertools import compress, count
from operator import attrgetter, not_
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from lightning_dp.parallel.comm import Packing
from lightning_dp.parallel.replicate.buffers import Buffers, entries
from lightning_dp.parallel.replicate.compiled import Compilations
from lightning_dp.parallel.replicate.parameters import LimitedNorms, Parameters, ParameterState
from lightning_dp.parallel.replicate.replica import Replica
from lightning_dp.parallel.replicate.structure import ModuleStructure, ReplicaRules

ParameterCopies: TypeAlias = Literal["changed", "frozen", "all"]
BufferCopies: TypeAlias = Literal["changed", "all", "read"]
_NONE: Set[int] = frozenset()
_GRAD = attrgetter("grad")


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
        self._may_share = True
        self._build()

    def _build(self) -> None:
        self._are_lost = self._has_failed = self._has_links = False
        self._shared_as: ParameterState | None = None  # the shared parameters as a step begins
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

        With them those buffers that are leaves and require gradients. Left out are replicas whose
        gradients are all in the root's, see `share_parameters`.
        """
        if self._buffers.leaves:
            leaves = [self._buffers.leaves, *(replica.buffers.leaves for replica in self._others)]
            return [[*own, *more] for own, more in zip(self._parameters, leaves, strict=True)]
        if self._shared_as is None:
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
        own = self._structure.parameters
        return [*own, *self._buffers.leaves] if self._buffers.leaves else own

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
                are_leaves = all(parameter.is_leaf for parameter in self._structure.parameters)
                if are_leaves and not self._are_lost:
                    self._before_rebuild(self.parameters)
                self._build()
                others = []
            else:
                for replica in self._others:
                    replica.attributes.follow(versions, everything=has_failed)
            if others:
                everything = parameters == "all"
                weights = [replica.weights for replica in others]
                frozen = parameters == "frozen"
                self._weights.refresh(weights, everything=everything, frozen=frozen)
                if buffers != "read" or everything or self._structure.reads_buffers():
                    self._refresh_buffers(others, everything=everything or buffers != "changed")
            for replica in self._others:
                if replica.generators.own:
                    replica.generators.follow(alone=bool(active and 0 not in active))
        self._has_failed = False

    def _refresh_buffers(self, others: list[Replica], *, everything: bool) -> None:
        if self._buffers.will_replace_leaves():
            self._before_rebuild(self.parameters)
        own = [replica.buffers for replica in others]
        made = set(map(id, self._buffers.refresh(own, everything=everything)))
        for replica in self._others:
            if id(replica.buffers) in made:
                replica.follow_buffers()

    def share_parameters(self, share: bool) -> None:
        """Has replicas on the root's device compute with the root's own parameters, or no longer.

        Their backwards then accumulate into the root's `.grad`, and there is nothing to sum. Called
        after every refresh; `share` only where replicas and their backwards run one after another.
        Shared are parameters that are trained, until a step changes one: see `check_shared`.
        """
        positions: Set[int] = _NONE
        self._shared_as = None
        if share and self._may_share and not self._buffers.leaves:
            state = ParameterState.of(self._structure.parameters)
            positions = set(compress(count(), state.requires_grad))
            if self.limited is not None:
                positions -= self.limited.positions
            self._shared_as = state if positions else None
        for device, replica in zip(self._devices[1:], self._others, strict=True):
            if not replica.weights.shares_memory:
                if torch.is_grad_enabled():
                    # Now, and not in the midst of a backward that has little memory left.
                    self.packing.sums.prepare([self._devices[0], device])
            elif replica.shared != positions:
                replica.share(positions)

    def check_shared(self) -> None:
        """Stops sharing for good if the step has written to, bound or frozen a parameter.

        Called before every replica but the first one that runs in a step. What that one, the root,
        does to its parameters the others do to theirs: so these must not be the root's.
        """
        before, roots = self._shared_as, self._structure.parameters
        if before is not None and before != ParameterState.of(roots):
            self._may_share = False
            self.share_parameters(False)

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

    def link_buffers(
        self, active: Iterable[int], on_backward: Callable[[list[str]], None]
    ) -> list[str]:
        """Has replicas compute with functions of those buffers of the root that have a graph.

        Returns their names. One backward of all replicas goes on in that graph, and calls
        `on_backward` with the names on its way.
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

    def adopt_rows(self, active: Iterable[int]) -> None:
        """Gives the root the rows of embeddings that a forward has shortened on replicas."""
        if self.limited is None:
            return
        for k in filter(None, active):
            if not self._others[k - 1].weights.shares_memory:
                self.limited.adopt(self._others[k - 1].parameters)
