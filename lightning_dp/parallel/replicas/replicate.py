"""Replicate: before every step the replicas are brought up to date, where the root has changed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import compress, count, repeat
from operator import attrgetter, is_not, methodcaller
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from lightning_dp.parallel.replicas.built import BuiltReplicas
from lightning_dp.parallel.replicas.changes import ParameterState
from lightning_dp.parallel.replicas.replica import Replica

ParameterCopies: TypeAlias = Literal["changed", "trained", "all"]
BufferCopies: TypeAlias = Literal["changed", "all", "read"]
_NONE: Set[int] = frozenset()
_IS_STALE = methodcaller("is_stale")
_GRAD, _COMPILES = attrgetter("grad"), attrgetter("compiles")
_SEEN = attrgetter("weights.seen")


class Replicas(BuiltReplicas):
    """Replicas that follow the root: before every step they are brought up to date with it."""

    _may_share = True
    _is_open = False  # a refresh has begun, and not ended
    _before: ParameterState | None = None  # of shared parameters, before a step
    _trained: tuple[list[bool], Set[int]] = ([], _NONE)  # and their positions
    _followed: ParameterState | None = None  # by a refresh, of which the step goes on

    @property
    def parameters(self) -> Sequence[Sequence[Tensor]]:
        """The parameters of every replica; equal positions correspond, tied ones appear once.

        With them those buffers that are trained, and leaves. Left out are replicas whose gradients
        are all in the root's, see `share_parameters`.
        """
        if self._buffers.leaves:
            leaves = [self._buffers.leaves, *(replica.buffers.leaves for replica in self._others)]
            return [[*own, *more] for own, more in zip(self._parameters, leaves, strict=True)]
        if self._before is None:
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

    def refresh(
        self,
        active: Collection[int] | None = None,
        *,
        parameters: ParameterCopies = "changed",
        buffers: BufferCopies = "changed",
        late: bool = False,
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

        If they may be `late`, parameters may still be on their way, see `Arriving`, until `arrive`.
        Nothing is late where something compiles: that code does not take them from its modules.
        """
        if self.are_late:
            self.arrive()
        if self._is_open:  # by a refresh that was interrupted: nobody knows what it has copied
            active, parameters, buffers = None, "all", "all"
        self._is_open = True
        others = [self._others[k - 1] for k in (active or range(len(self._devices))) if k > 0]
        self._followed = None
        self.attributes.look()
        # An inference tensor could never be trained, and evaluation often comes before training.
        with torch.inference_mode(False), torch.no_grad():
            if self._are_lost:
                self._build()
            elif self._structure.tables.have_changed():
                # The weights of a functional call accumulate nothing.
                if all(parameter.is_leaf for parameter in self._structure.parameters):
                    self._before_rebuild(self.parameters)
                self._build()
            elif others:
                self._follow(others, parameters, late=late)
                if self._structure.with_buffers:
                    self._follow_buffers(others, parameters, buffers)
            for replica in self._others:
                if replica.generators.own:
                    replica.generators.follow(alone=bool(active and 0 not in active))
        self._is_open = False

    def _follow(self, others: list[Replica], parameters: ParameterCopies, *, late: bool) -> None:
        """Has replicas follow the root, but for the buffers."""
        versions = self.attributes.versions
        for replica in others:  # a frame only for those that have to follow
            counts = list(map(len, replica.attributes))
            is_same = versions == replica.versions and counts == replica.counts
            if not is_same or any(map(_IS_STALE, replica.watched)):
                replica.refresh(versions)
        versioned = self._silent is not None or self._before is not None
        self._followed = state = ParameterState.of(self._structure.parameters, versions=versioned)
        self._all_trained = all(state.requires_grad)
        limited = set() if self.limited is None else self.limited.positions
        silent = limited | (set() if self._silent is None else self._silent.look())
        bound, seen = self._weights.bound, map(_SEEN, others)
        is_bound = (bound.pointers, bound.requires_grad) == (state.pointers, state.requires_grad)
        # Replicas that share memory have seen it as one object, and others never do.
        if (
            parameters != "changed"
            or silent
            or not is_bound
            or any(map(is_not, seen, repeat(bound)))
        ):
            late = late and not self.may_compile and not self.compiled.counts()["total"]
            self._weights.refresh([r.weights for r in others], state, parameters, silent, late)
        if self.shared_writes is not None and self.shared_writes.apart:
            self.shared_writes.refresh()

    def _follow_buffers(
        self, others: list[Replica], parameters: ParameterCopies, buffers: BufferCopies
    ) -> None:
        if parameters != "all" and buffers == "read" and not self._structure.reads_buffers():
            return
        if self._buffers.will_replace_leaves():
            self._before_rebuild(self.parameters)
        everything = parameters == "all" or buffers != "changed"
        self._buffers.refresh([r.buffers for r in others], everything=everything)

    def refresh_parameters(self, active: Iterable[int]) -> None:
        """Brings the parameters of some replicas up to date, in the middle of a step.

        Attributes and buffers stay as the step has left them on each replica.
        """
        if self.are_late:
            self.arrive()
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
        positions = _NONE
        if share and self._may_share and not self._buffers.leaves:
            positions = self._choose_shared()
        if not positions:
            self._before = None
        for device, replica in zip(self._devices[1:], self._others, strict=True):
            if not replica.shares_memory:
                if torch.is_grad_enabled():
                    # Now, and not in the midst of a backward that has little memory left.
                    self.packing.sums.prepare([self._devices[0], device])
            elif replica.shared is not positions and replica.shared != positions:
                replica.share(positions)

    def _choose_shared(self) -> Set[int]:
        """Those that are trained, but for some: one object as long as it is equal."""
        state = self._followed
        if state is None or not state.versions:
            state = ParameterState.of(self._structure.parameters, versions=True)
        if state.requires_grad != self._trained[0]:
            self._trained = state.requires_grad, set(compress(count(), state.requires_grad))
        self._before, positions = state, self._trained[1]
        return positions if self.limited is None else positions - self.limited.positions

    def check_shared(self) -> None:
        """Shares nothing from now on if the step has written to, bound or frozen a parameter.

        To be called before every replica but the first one that runs in a step. What that one, the
        root, does to its parameters the others do to theirs: so these have to be their own.
        """
        before, roots = self._before, self._structure.parameters
        if before is not None and before != ParameterState.of(roots, versions=True):
            self._may_share = False
            self.share_parameters(False)

    @property
    def may_compile(self) -> bool:
        """Whether a call may compile something: replicas then run in order."""
        return self.compiled.are_known or any(map(_COMPILES, self._others))

    def noticed(self, active: Sequence[int], *, training: bool) -> AbstractContextManager[None]:
        """What surrounds a step: writes to buffers and, in training, shared weights are noticed."""
        state, shared = self._buffer_state, self.shared_writes
        buffers = state.noticed(active, training) if state.positions else nullcontext()
        if not training or shared is None or (self._all_trained and not shared.trained.is_looking):
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
