"""Statistics: which numbers of traces are of samples, and which are statistics over these.

Shards differ in samples: in the traces of the replicas, a dimension that differs counts samples,
and what has lost it is a statistic over them, or one of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

from lightning_dp.parallel.additive.degrees import degree_of, grow
from lightning_dp.parallel.additive.functions import (
    AT_PLACES_OF,
    FROM_HOST,
    KEPT,
    ONE_OF_MANY,
    PLACES,
)
from lightning_dp.parallel.additive.traces import Call, Given, Trace

_OF_THE_FIRST = {
    *("expand", "expand_as", "narrow", "pad", "repeat", "repeat_interleave", "reshape"),
    *("reshape_as", "resize_as_", "tile", "to", "type_as", "unflatten", "view", "view_as"),
}
"""What takes no more of others than a shape or a dtype."""

_AT_PLACES = {"gather", "getitem", "grouped_mm", "index_select", "take", "take_along_dim"}
"""What takes places of others: a statistic tells which elements then, and not how much.

Without the underscores around a name.
"""

_COMPARED = {"eq", "ge", "gt", "le", "lt", "ne"}

_OF_NONE = ("arange", "empty", "eye", "full", "new_", "ones", "rand", "zeros")
"""How the names begin of what takes no more than a shape or a dtype of any."""


class _Statistic(NamedTuple):
    """By the name of what made it."""

    name: str
    is_floating: bool


class Known:
    """The numbers of samples, of statistics over them, and of pairs of samples.

    Args:
        traces: of what the replicas did with their shards.
        sizes: of the shards.
        with_gradient: whether statistics count that have one, as no graph is looked at.
    """

    def __init__(self, traces: Sequence[Trace], sizes: Sequence[int], with_gradient: bool) -> None:
        self.sizes, self._with_gradient = sizes, with_gradient
        self.with_numbers = all([trace.numbers_are_the_shards() for trace in traces])
        leaves = [*zip(*(trace.shard for trace in traces), strict=False)]
        self._samples = {given[0].number for given in leaves if differ_in_shape(given)}
        self._places = set[int]()  # what each sample has by its place in its shard
        self._statistics: dict[int, _Statistic] = {}
        # Those that have a gradient: what is made of them without one no graph shows.
        self._in_graphs: dict[int, _Statistic] = {}
        firsts = [{own.shape[:1] for own in given} for given in leaves]
        # Those of what is as long in all shards, such as nodes of graphs, by chance.
        self._lengths = {length for own in firsts if len(own) == 1 for length in own}
        self.pairs = {given[0].number for given in leaves if self.are_pairs(given)}

    def are_pairs(self, given: Sequence[Given]) -> bool:
        """Whether two dimensions have one length, in proportion to the samples of each shard."""
        shapes = [own.shape for own in given]
        if len({*map(len, shapes)}) > 1:
            return False
        lengths = [*zip(*shapes, strict=True)]
        return any(
            one == other and grow(one, self.sizes) for one, other in combinations(lengths, 2)
        )

    def follow(self, calls: Sequence[Call]) -> None:
        """Learns of what the same call gave on all replicas."""
        call, is_of_samples = calls[0], self.is_of_samples(calls[0])
        statistic, makes_one = self.statistic(call), self._makes_one(call)
        looked_up = statistic if self._looks_up(call) else None
        are_places = not is_of_samples and (call.name in PLACES or self.is_of_places(call))
        statistic = statistic or self.statistic(call, self._in_graphs)
        for i, given in enumerate(zip(*(own.gives for own in calls), strict=True)):
            number = given[0].number
            self._forget(number)
            if self.are_pairs(given):
                self.pairs.add(number)
            if are_places and differ_in_shape(given):
                self._places.add(number)
            if self._are_counts(calls, i):
                self._statistics[number] = _Statistic(call.name, is_floating=False)
            elif (is_of_samples or makes_one) and differ_in_shape(given):
                self._samples.add(number)
                if looked_up is not None:
                    self._statistics[number] = looked_up
            elif statistic is not None or (makes_one and _tell(given, self.sizes)):
                name = call.name if statistic is None else statistic.name
                is_left = self.is_left_to_graphs(given) and name not in AT_PLACES_OF
                own = self._in_graphs if is_left else self._statistics
                own[number] = _Statistic(name, given[0].is_floating)

    def _makes_one(self, call: Call) -> bool:
        """Whether a call may make a statistic, or one of the samples, where there was none."""
        if call.name in FROM_HOST:
            return self.with_numbers
        is_picked = call.name in ONE_OF_MANY and len(call.takes) > 1  # as many in each, by chance
        is_picked |= call.name in AT_PLACES_OF and call.gives[0].shape[:1] in self._lengths
        return call.name in KEPT and not is_picked and self.is_of_samples(call)

    def _forget(self, number: int) -> None:
        for known in (self._statistics, self._in_graphs):
            known.pop(number, None)
        for numbers in (self._samples, self._places):
            numbers.discard(number)

    def _looks_up(self, call: Call) -> bool:
        """Whether each sample gets what a statistic says of its class, or has got it before."""
        name = call.name.strip("_")
        has_it = not self._samples.isdisjoint(self._statistics.keys() & taken_by(call))
        return name in _AT_PLACES or (has_it and name not in _COMPARED)

    def _are_counts(self, calls: Sequence[Call], i: int) -> bool:
        """Whether a result are counts of different values, as of classes."""
        count, first = len(calls[0].gives), [own.gives[0].shape for own in calls]
        if not calls[0].name.startswith("unique") or not 0 < i == count - 1:
            return False
        are_counts = first == [own.gives[i].shape for own in calls]
        return are_counts and not grow([*map(math.prod, first)], self.sizes)

    def is_left_to_graphs(self, given: Sequence[Given]) -> bool:
        """Whether a gradient goes through what is given, and a graph is looked at for it."""
        return not self._with_gradient and any([own.has_gradient for own in given])

    def is_of_samples(self, call: Call) -> bool:
        """Whether a call takes values of samples."""
        return not self._samples.isdisjoint(taken_by(call))

    def is_of_places(self, call: Call) -> bool:
        """Whether a call takes values that follow from places in a shard."""
        return not self._places.isdisjoint(taken_by(call))

    def statistic(
        self, call: Call, among: dict[int, _Statistic] | None = None
    ) -> _Statistic | None:
        """One that a call takes: without a gradient, or among others."""
        if call.name == "grad":
            return None  # of a sum over samples: that of each
        known = self._statistics if among is None else among
        taken = call.takes[:1] if call.name.strip("_") in _AT_PLACES else taken_by(call)
        return next((known[n] for n in taken if n in known), None)


def taken_by(call: Call) -> tuple[int, ...]:
    """The numbers of those tensors whose values count."""
    if call.name.startswith(_OF_NONE):
        return ()
    return call.takes[:1] if call.name in _OF_THE_FIRST else call.takes


def differ_in_shape(given: Sequence[Given]) -> bool:
    """Whether a dimension differs between shards: it counts samples, or comes with them."""
    return len({own.shape for own in given}) > 1


def _tell(given: Sequence[Given], sizes: Sequence[int]) -> bool:
    """Whether a statistic is another one in each shard, and no count of all samples."""
    values = [own.value for own in given if own.value is not None]
    return len(values) < len(given) or degree_of(values, sizes) not in (0, 1)
