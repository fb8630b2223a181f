"""Relations: samples that are put in relation to others of their shard, or to a statistic of it.

Shards differ in samples: in the traces of the replicas, a dimension that differs counts samples,
and what has lost it is a statistic over them, or one of them. What is computed from that and from
samples again is not what it would be of the whole batch; nor is what a function makes along that
dimension, or what two of them are pairs of. So is a number that the host has computed from
the shard. In a step's loss, what has a gradient is left to its graph; see `torch_mixing`.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_dp.parallel.additive.along import changes_order
from lightning_dp.parallel.additive.degrees import degree_of, grow
from lightning_dp.parallel.additive.paths import side_by_side
from lightning_dp.parallel.additive.traces import (
    FROM_HOST,
    KEPT,
    ONE_OF_MANY,
    Call,
    Given,
    Trace,
    tensors_of,
)

_OF_THE_FIRST = {
    *("expand", "expand_as", "narrow", "pad", "repeat", "repeat_interleave", "reshape"),
    *("reshape_as", "resize_as_", "tile", "to", "type_as", "unflatten", "view", "view_as"),
}
"""What takes no more of others than a shape or a dtype."""

_AT_PLACES = {"gather", "getitem", "grouped_mm", "index_select", "take", "take_along_dim"}
"""What takes places of others: a statistic tells which elements then, and not how much.

Without the underscores around a name.
"""

_OF_NONE = ("arange", "empty", "eye", "full", "new_", "ones", "rand", "zeros")
"""How the names begin of what takes no more than a shape or a dtype of any."""


NOT_THE_BATCHS = "What shards have of their own samples is not what the batch has."
"""What warnings say of samples that meet."""


PAIRS, A_NUMBER = "pairs", "a number"
"""In what else samples meet than in a statistic."""

_MADE_BY = {name: "one of them" for name in ONE_OF_MANY} | {
    name: "numbers of the shard's own, which went through the host" for name in FROM_HOST
}


class Related(NamedTuple):
    """Names of functions: what made the statistic, if it was one, and in what samples met.

    Instead of a statistic it may be `PAIRS` of samples, or `A_NUMBER`.
    """

    statistic: str
    met_in: str

    def __str__(self) -> str:
        """For people."""
        if not self.statistic:
            is_order = changes_order(self.met_in)
            return f"{'another order of' if is_order else self.met_in + ' along'} samples"
        if self.statistic == PAIRS:
            return f"{self.met_in} of pairs of samples"
        if self.statistic == A_NUMBER:
            return f"{self.met_in} of a number that is another one in each shard"
        made_by = _MADE_BY.get(self.statistic, f"{self.statistic} over all of them")
        return f"{self.met_in} of samples and of {made_by}"


def related(
    traces: Sequence[Trace],
    results: Sequence[Sequence[Tensor]],
    sizes: Sequence[int],
    *,
    with_gradient: bool = False,
) -> Related | None:
    """Where results depend on samples in relation to a statistic over them; None if nothing tells.

    Nothing does where replicas did not call the same functions, or have equally many samples, or
    where the statistic is the same in all shards.

    Args:
        traces: of what the replicas did with their shards.
        results: what it returned.
        sizes: of the shards.
        with_gradient: whether statistics count that have one, as no graph is looked at.

    Example:
        >>> def traced(loss, shard):
        ...     with Trace(shard) as trace:
        ...         return trace, loss(shard)
        >>> shards = torch.arange(5.0).split([3, 2])
        >>> centred = [traced(lambda x: [(x - x.mean()).abs().mean()], shard) for shard in shards]
        >>> related(*zip(*centred), (3, 2))
        Related(statistic='mean', met_in='sub')
        >>> plain = [traced(lambda x: [x.abs().mean()], shard) for shard in shards]
        >>> related(*zip(*plain), (3, 2)) is None
        True
    """
    known = _Known(traces, sizes, with_gradient)
    pairs = zip(traces, results, strict=True)
    numbers = [[trace.number_of(tensor) for tensor in own] for trace, own in pairs]
    for calls in side_by_side(traces, numbers):
        if (found := known.met(calls)) is not None:
            return found
        known.follow(calls)
    return None


def has_told_of_related(
    name: str, traces: Sequence[Trace], outputs: Sequence[Any], sizes: Sequence[int], advice: str
) -> bool:
    """Warns of outputs that are not of each sample by itself, as `related`; whether it has."""
    found = related(traces, [*map(tensors_of, outputs)], sizes, with_gradient=True)
    if found is not None:
        warnings.warn(
            f"{name}: expected outputs that samples have by themselves, got {found}. "
            f"{NOT_THE_BATCHS} {advice}",
            stacklevel=2,
        )
    return found is not None


class _Statistic(NamedTuple):
    """By the name of what made it."""

    name: str
    is_floating: bool


class _Known:
    """The numbers of samples, and of statistics over them."""

    def __init__(self, traces: Sequence[Trace], sizes: Sequence[int], with_gradient: bool) -> None:
        self._sizes, self._with_gradient = sizes, with_gradient
        self._with_numbers = all([trace.numbers_are_the_shards() for trace in traces])
        leaves = [*zip(*(trace.shard for trace in traces), strict=False)]
        self._samples = {given[0].number for given in leaves if differ_in_shape(given)}
        self._statistics: dict[int, _Statistic] = {}
        # Those that have a gradient: what is made of them without one no graph shows.
        self._in_graphs: dict[int, _Statistic] = {}
        self._pairs = {given[0].number for given in leaves if self._are_pairs(given)}

    def met(self, calls: Sequence[Call]) -> Related | None:
        """In what samples meet where all replicas make the same call, if they do."""
        return (
            self._met_in(calls[0])
            or self._met_along(calls)
            or self._met_in_pairs(calls)
            or self._met_in_a_number(calls)
        )

    def _met_in(self, call: Call) -> Related | None:
        """What a call makes of samples and a statistic, if it takes both.

        With a statistic of whole numbers it has to be how much: else samples are counted or chosen,
        as for a mask up to the longest of them.
        """
        statistic = self._statistic(call)
        if statistic is None or not self._is_of_samples(call):
            return None
        is_amount = statistic.is_floating or any([given.is_floating for given in call.gives])
        return Related(statistic.name, call.name) if is_amount else None

    def _met_along(self, calls: Sequence[Call]) -> Related | None:
        """What the same call of all replicas makes along the dimension of samples.

        As long as that is on each: what a shard was padded to is another number by chance.
        """
        call, first = calls[0], [own.gives[0] for own in calls]
        if not self._is_of_samples(call) or self._is_left_to_graphs(first):
            return None
        if len({len(given.shape) for given in first}) > 1:
            return None  # a shard of one sample may have lost its dimension
        for dim in call.along:
            lengths = [length for given in first for length in given.shape[dim : dim + 1]]
            if grow(lengths, self._sizes):
                return Related("", call.name)
        return None

    def _met_in_pairs(self, calls: Sequence[Call]) -> Related | None:
        """What the same call of all replicas makes of each sample and each other one."""
        call, first = calls[0], [own.gives[0] for own in calls]
        if not self._is_of_samples(call) or self._is_left_to_graphs(first):
            return None
        if not self._are_pairs(first) or not self._pairs.isdisjoint(call.takes):
            return None  # of pairs that were there before, or as long by chance
        return Related(PAIRS, call.name)

    def _are_pairs(self, given: Sequence[Given]) -> bool:
        """Whether two dimensions have one length, in proportion to the samples of each shard."""
        shapes = [own.shape for own in given]
        if len({*map(len, shapes)}) > 1:
            return False
        lengths = [*zip(*shapes, strict=True)]
        return any(
            one == other and grow(one, self._sizes) for one, other in combinations(lengths, 2)
        )

    def _met_in_a_number(self, calls: Sequence[Call]) -> Related | None:
        """What takes a number of Python's that each shard has of its own."""
        floats = [own.floats for own in calls] if self._with_numbers else []
        for values in zip(*floats, strict=False):
            if degree_of([*map(torch.tensor, values)], self._sizes) is None:
                return Related(A_NUMBER, calls[0].name)
        return None

    def follow(self, calls: Sequence[Call]) -> None:
        """Learns of what the same call gave on all replicas."""
        call, is_of_samples = calls[0], self._is_of_samples(calls[0])
        statistic, makes_one = self._statistic(call), self._makes_one(call)
        statistic = statistic or self._statistic(call, self._in_graphs)
        for given in zip(*(own.gives for own in calls), strict=True):
            number = given[0].number
            for known in (self._statistics, self._in_graphs):
                known.pop(number, None)
            self._samples.discard(number)
            if self._are_pairs(given):
                self._pairs.add(number)
            if (is_of_samples or makes_one) and differ_in_shape(given):
                self._samples.add(number)
            elif statistic is not None or (makes_one and _tell(given, self._sizes)):
                name = call.name if statistic is None else statistic.name
                own = self._in_graphs if self._is_left_to_graphs(given) else self._statistics
                own[number] = _Statistic(name, given[0].is_floating)

    def _makes_one(self, call: Call) -> bool:
        """Whether a call may make a statistic, or one of the samples, where there was none."""
        if call.name in FROM_HOST:
            return self._with_numbers
        is_picked = call.name in ONE_OF_MANY and len(call.takes) > 1  # as many in each, by chance
        return call.name in KEPT and not is_picked and self._is_of_samples(call)

    def _is_left_to_graphs(self, given: Sequence[Given]) -> bool:
        return not self._with_gradient and any([own.has_gradient for own in given])

    def _is_of_samples(self, call: Call) -> bool:
        return not self._samples.isdisjoint(taken_by(call))

    def _statistic(
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
