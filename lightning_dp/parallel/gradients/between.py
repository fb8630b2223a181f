"""Between processes: which of the root's gradients are sums of all of them, and which are not yet.

A backward that accumulates leaves gradients that are this process's own, and costs no traffic. The
next one that does not adds up what all processes have by then.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from itertools import repeat
from operator import attrgetter, is_not

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_dp.parallel.processes import Room, Sums, World

_GRAD = attrgetter("grad")
_MOST = 4  # choices of parameters, as adversaries that take turns make them


class Between:
    """Makes of the root's gradients those of all processes.

    Some may be sums of all already when a backward adds to them. From then on only the first
    process has them, and the others zeros: so they are added up once.

    Args:
        world: the processes.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._own: dict[int, Tensor] = {}  # parameters whose gradients are this process's own
        self._known: list[Sums] = []
        self._room = Room()
        self._sums: Sums | None = None  # of a backward that has not ended
        self._handles: list[RemovableHandle] = []

    def own_among(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Those whose gradients are this process's own."""
        return [p for p in parameters if id(p) in self._own] if self._own else []

    def begin(self, parameters: Sequence[Tensor], without: Collection[int], *, stay: bool) -> None:
        """A backward is going to add to the gradients of these parameters, without some.

        The gradients stay this process's own, or get their sums when the backward ends.
        """
        self.cancel()
        trained = [
            p
            for i, p in enumerate(parameters)
            if (p.requires_grad or id(p) in self._own) and i not in without
        ]
        if any(map(is_not, map(_GRAD, trained), repeat(None))):
            self._leave_to_first(trained)
        if stay:
            self._own |= zip(map(id, trained), trained, strict=True)
        else:
            self._sums = self._sums_of(trained)
            self._sums.begin()

    @torch.no_grad()
    def _leave_to_first(self, parameters: Sequence[Tensor]) -> None:
        for parameter in parameters if self._world.rank > 0 else ():
            if parameter.grad is not None and id(parameter) not in self._own:
                parameter.grad.zero_()

    def leave_early(self) -> None:
        """From now on buckets may leave.

        What runs now has to be the last to fill the root's gradients, and must not run out of
        memory.
        """
        sums = self._sums
        if sums is None or sums.was_late:
            return
        self._missing = [len(bucket.positions) for bucket in sums.buckets]
        for j, parameters in enumerate(sums.rows_of_parameters[:-1]):
            for own in parameters:
                if own.is_leaf and own.requires_grad:
                    call = partial(self._fill, sums, j)
                    self._handles.append(own.register_post_accumulate_grad_hook(call))

    def _fill(self, sums: Sums, j: int, _: Tensor) -> None:
        self._missing[j] -= 1
        while sums.left < len(self._missing) - 1 and self._missing[sums.left] <= 0:
            sums.leave()

    def finish(self) -> None:
        """The backward has ended: gradients are those of all processes from now on."""
        self._unhook()
        sums, self._sums = self._sums, None
        if sums is not None:
            sums.end()
            self._own = {}

    def sum_(self, parameters: Sequence[Tensor]) -> None:
        """Adds up the gradients of some parameters, which are this process's own."""
        self._sums_of(parameters).sum_()
        for parameter in parameters:
            self._own.pop(id(parameter), None)

    def sum_waiting(self) -> None:
        """Adds up what has accumulated, if no backward has come to do so."""
        if self._own:
            self.sum_(list(self._own.values()))

    def cancel(self) -> None:
        """Forgets a backward that did not end."""
        self._unhook()
        sums, self._sums = self._sums, None
        if sums is not None:
            sums.cancel()

    def _unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _sums_of(self, parameters: Sequence[Tensor]) -> Sums:
        for sums in self._known:
            if sums.fits(parameters):
                return sums
        sums = Sums(parameters, self._world, self._room)
        self._known = [sums, *self._known[: _MOST - 1]]
        return sums
