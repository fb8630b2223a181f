"""Sums: the gradients of all processes, added up bucket by bucket.

A bucket is on its way while the next one is packed, or filled by a backward. All processes send
the same buckets in the same order, so the bits of a sum do not depend on who is ready when.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from operator import attrgetter, is_not
from typing import Any

import torch
from torch import Tensor

from lightning_dp.parallel.processes.buckets import Gradients, buckets
from lightning_dp.parallel.processes.on_the_way import OnTheWay, Room
from lightning_dp.parallel.processes.world import World

_GRAD = attrgetter("grad")


class Sums:
    """Gives some parameters the sums of all processes' gradients, again and again.

    One without a gradient in every process keeps None. Sparse gradients travel on their own, and
    their parameters are in no bucket any more once some process had such a one.

    Between `begin` and `end` buckets may leave, each once its gradients are complete. Should a
    backward add to one that has left, in any process, then what came late is added up at the end,
    and `was_late` is True from there on in every process.
    """

    was_late = False

    def __init__(self, parameters: Sequence[Tensor], world: World, room: Room) -> None:
        self._world, self._room = world, room
        self._parameters = list(parameters)
        self._apart: list[int] = []  # had sparse gradients
        self._sparse: dict[int, Tensor] = {}  # this process's, in what is in a bucket
        self._make()

    def _make(self) -> None:
        packed = [i for i in range(len(self._parameters)) if i not in self._apart]
        self.buckets = list(buckets(self._parameters, packed))
        get = self._parameters.__getitem__
        self.rows_of_parameters = [[*map(get, bucket.positions)] for bucket in self.buckets]
        self._way = OnTheWay(self.buckets, self._world, self._room)
        self._rows: list[Gradients] = []

    def fits(self, parameters: Sequence[Tensor]) -> bool:
        """Whether these are the parameters that it is for."""
        are_as_many = len(parameters) == len(self._parameters)
        return are_as_many and not any(map(is_not, parameters, self._parameters))

    def sum_(self) -> None:
        """Adds up what is there."""
        self.begin()
        self.end()

    def begin(self) -> None:
        """A backward is going to fill gradients.

        Memory is taken now: others would wait for a bucket that finds none later.
        """
        self._way.clear()
        self._way.prepare()
        self._rows = []

    @property
    def left(self) -> int:
        """So many buckets have left."""
        return len(self._rows)

    @torch.no_grad()
    def leave(self) -> None:
        """The next bucket leaves in the midst of a backward. It must not be the last one."""
        self._leave(is_early=True)

    @torch.no_grad()
    def end(self) -> None:
        """All gradients are there, and get their sums."""
        late = any([p.grad is not None for p in self._gone()])
        for _ in range(self.left, len(self.buckets)):
            self._leave(late=late)
        self._way.arrive()
        told = self._way.told()
        before = len(self._apart)
        if self._give(told):
            self.was_late = True
            self._add_late()
        if len(self._apart) > before:
            self._make()

    def cancel(self) -> None:
        """Forgets a round that does not end."""
        self._way.clear()
        for bucket, row in zip(self.buckets, self._rows, strict=False):
            for i, gradient in zip(bucket.positions, row, strict=True):
                self._parameters[i].grad = gradient
        self._rows = []

    def _gone(self) -> Iterator[Tensor]:
        gone = chain.from_iterable(b.positions for b in self.buckets[: self.left])
        return (self._parameters[i] for i in gone)

    def _leave(self, *, is_early: bool = False, late: bool = False) -> None:
        j = self.left
        own = [self._parameters[i] for i in self.buckets[j].positions]
        row: Gradients = list(map(_GRAD, own))
        self._rows.append(row)  # first: an error may come in between
        for i, gradient in zip(self.buckets[j].positions, row, strict=True):
            if gradient is not None and gradient.layout is not torch.strided:
                self._sparse[i] = gradient
        for parameter in own:
            parameter.grad = None
        self._way.send(j, row, is_early=is_early, late=late and self.left == len(self.buckets))

    def _give(self, told: Sequence[float]) -> bool:
        """Gives parameters the sums that have arrived; whether anything came late anywhere.

        What came late to this process is in the rows afterwards.
        """
        flags, is_late = iter(told), False
        new: list[int] = []
        for bucket, row in zip(self.buckets, self._rows, strict=True):
            for k, i in enumerate(bucket.positions):
                is_dense, is_sparse = next(flags), next(flags)
                total = row[k] if is_dense else None
                row[k], self._parameters[i].grad = self._parameters[i].grad, total
                if is_sparse:
                    new.append(i)
            is_late |= bool(next(flags))
        if self._apart or new:
            self._add_sparse([*self._apart, *new])
        self._apart += new
        return is_late

    def _add_sparse(self, positions: Sequence[int]) -> None:
        """Adds up the gradients at these positions that are in no bucket."""
        own = {i: self._parameters[i].grad for i in self._apart} | self._sparse
        self._sparse = {}
        told = self._world.gather([_told(own.get(i)) for i in positions])
        for i, column in zip(positions, zip(*told, strict=True), strict=True):
            parameter = self._parameters[i]
            total = None if i in self._apart else parameter.grad
            for gradient in map(_heard, column):
                if gradient is not None:
                    arrived = gradient.to(parameter.device)
                    total = arrived if total is None else total + arrived
            is_sparse = total is not None and total.layout is torch.sparse_coo
            parameter.grad = total.coalesce() if is_sparse and total is not None else total

    def _add_late(self) -> None:
        """Does another round for what has come late."""
        totals = list(map(_GRAD, self._parameters))
        for i in self._apart:
            self._parameters[i].grad = None
        for bucket, row in zip(self.buckets, self._rows, strict=True):
            for i, gradient in zip(bucket.positions, row, strict=True):
                self._parameters[i].grad = gradient
        self.sum_()
        for parameter, total in zip(self._parameters, totals, strict=True):
            if total is not None:
                parameter.grad = total if parameter.grad is None else total + parameter.grad


def _told(gradient: Tensor | None) -> Any:
    """A gradient of any layout, for others to read."""
    if gradient is None or gradient.layout is not torch.sparse_coo:
        return gradient
    together = gradient.coalesce()
    return together.indices(), together.values(), tuple(together.shape)


def _heard(told: Any) -> Tensor | None:
    # To leave the checks to their default has torch warn.
    is_sparse = isinstance(told, tuple)
    return torch.sparse_coo_tensor(*told, check_invariants=False) if is_sparse else told
