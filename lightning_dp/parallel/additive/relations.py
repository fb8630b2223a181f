"""Relations: samples that are put in relation to others of their shard, or to a statistic of it.

What is computed from a statistic over samples and from samples again is not what it would be of
the whole batch; nor is what a function makes along the dimension of samples, or what two of them
are pairs of. So is a number that the host has computed from the shard. In a step's loss, what has a
gradient is left to its graph; see `torch_mixing`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_dp.parallel.additive.degrees import degree_of, grow
from lightning_dp.parallel.additive.findings import A_LAYER, A_NUMBER, A_PLACE, PAIRS, Related
from lightning_dp.parallel.additive.functions import ONE_OF_MANY
from lightning_dp.parallel.additive.paths import side_by_side
from lightning_dp.parallel.additive.statistics import Known
from lightning_dp.parallel.additive.traces import Call, Trace

_DECIDE_ALONE = {"count_nonzero", "nansum", "sum", *ONE_OF_MANY}

_AMOUNTS = {
    *("add", "div", "dot", "iadd", "imul", "isub", "itruediv", "mul", "pow", "radd", "rmul"),
    *("rsub", "rtruediv", "sub", "truediv", "where"),
}
"""What takes how much its arguments are, element by element."""


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
    pairs = zip(traces, results, strict=True)
    numbers = [[trace.number_of(tensor) for tensor in own] for trace, own in pairs]
    return related_at(numbers, traces, sizes, with_gradient=with_gradient)


def related_at(
    numbers: Sequence[Sequence[int]],
    traces: Sequence[Trace],
    sizes: Sequence[int],
    *,
    with_gradient: bool = False,
) -> Related | None:
    """The same of numbers of the traces."""
    known = _Related(traces, sizes, with_gradient)
    for calls in side_by_side(traces, numbers):
        if (found := known.met(calls)) is not None:
            return found
        known.follow(calls)
    return None


def decided(traces: Sequence[Trace], sizes: Sequence[int]) -> str | None:
    """By what statistic the host has first decided otherwise for one shard than for another.

    None where all decisions are the same, where a sample decides for itself, and where counts and
    sums decide: as to whether there is anything at all to be computed, which changes no number.

    Example:
        >>> def step(x):
        ...     return x * 2 if x.mean() > 1 else x
        >>> traces = []
        >>> for shard in torch.arange(5.0).split([3, 2]):
        ...     with Trace(shard) as trace:
        ...         _ = step(shard)
        ...     traces.append(trace)
        >>> decided(traces, (3, 2))
        'mean over all of them'
    """
    for decisions in zip(*(trace.decisions for trace in traces), strict=False):
        numbers, outcomes = zip(*decisions, strict=True)
        if len({*outcomes}) > 1:
            known, by = Known(traces, sizes, with_gradient=True), None
            for calls in side_by_side(traces, [[number] for number in numbers]):
                by = known.statistic(calls[0])
                known.follow(calls)
            if by is None or not by.is_floating or by.name in _DECIDE_ALONE:
                return None
            return f"{by.name} over all of them"
    return None


class _Related(Known):
    """In what samples meet."""

    def met(self, calls: Sequence[Call]) -> Related | None:
        """In what samples meet where all replicas make the same call, if they do."""
        return (
            self._met_in(calls[0])
            or self._met_along(calls)
            or self._met_in_a_layer(calls)
            or self._met_with_places(calls)
            or self._met_in_pairs(calls)
            or self._met_in_a_number(calls)
        )

    def _met_in(self, call: Call) -> Related | None:
        """What a call makes of samples and a statistic, if it takes both.

        With a statistic of whole numbers it has to be how much: else samples are counted or chosen,
        as for a mask up to the longest of them.
        """
        statistic = self.statistic(call)
        if statistic is None or not self.is_of_samples(call):
            return None
        is_amount = statistic.is_floating or any([given.is_floating for given in call.gives])
        return Related(statistic.name, call.name) if is_amount else None

    def _met_along(self, calls: Sequence[Call]) -> Related | None:
        """What the same call of all replicas makes along the dimension of samples.

        As long as that is on each: what a shard was padded to is another number by chance.
        """
        call, first = calls[0], [own.gives[0] for own in calls]
        if not self.is_of_samples(call) or self.is_left_to_graphs(first):
            return None
        if len({len(given.shape) for given in first}) > 1:
            return None  # a shard of one sample may have lost its dimension
        for dim in call.along:
            lengths = [length for given in first for length in given.shape[dim : dim + 1]]
            if grow(lengths, self.sizes):
                return Related("", call.name)
        return None

    def _met_in_a_layer(self, calls: Sequence[Call]) -> Related | None:
        """What the same layer of all replicas mixes with others, which no graph shows."""
        lengths = zip(*(own.mixed for own in calls), strict=False)
        is_met = self.is_of_samples(calls[0]) and any([grow(own, self.sizes) for own in lengths])
        return Related(A_LAYER, calls[0].name) if is_met else None

    def _met_with_places(self, calls: Sequence[Call]) -> Related | None:
        """What is computed from samples and from their places in a shard."""
        call, lengths = calls[0], [own.gives[0].shape[:1] for own in calls]
        is_amount = call.name.strip("_") in _AMOUNTS and call.gives[0].is_floating
        if not (is_amount and self.is_of_samples(call) and self.is_of_places(call)):
            return None
        are_all = all([shape == (n,) for shape, n in zip(lengths, self.sizes, strict=True)])
        return Related(A_PLACE, call.name) if are_all else None

    def _met_in_pairs(self, calls: Sequence[Call]) -> Related | None:
        """What the same call of all replicas makes of each sample and each other one."""
        call, first = calls[0], [own.gives[0] for own in calls]
        if not self.is_of_samples(call) or self.is_left_to_graphs(first):
            return None
        if not self.are_pairs(first) or not self.pairs.isdisjoint(call.takes):
            return None  # of pairs that were there before, or as long by chance
        return Related(PAIRS, call.name)

    def _met_in_a_number(self, calls: Sequence[Call]) -> Related | None:
        """What takes a number of Python's that each shard has of its own."""
        floats = [own.floats for own in calls] if self.with_numbers else []
        for values in zip(*floats, strict=False):
            if degree_of([*map(torch.tensor, values)], self.sizes) is None:
                return Related(A_NUMBER, calls[0].name)
        return None
