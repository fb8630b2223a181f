"""Summaries: whether a number of each shard is a mean over its samples, as traces show.

Numbers that steps log are joined as means, weighted by samples, or added up. Of a mean or a sum
over samples that is the batch's. Of a function of one it is not, nor of a maximum or a deviation.
Only what is known here is told; what comes of another function is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_dp.parallel.additive.degrees import are_equal, degree_of, grow, precise
from lightning_dp.parallel.additive.paths import side_by_side
from lightning_dp.parallel.additive.statistics import differ_in_shape, taken_by
from lightning_dp.parallel.additive.traces import NO_NUMBER, Call, Given, Trace

_SUMS = {"count_nonzero", "dot", "matmul", "mm", "mv", "nansum", "sum"}
"""What may take the dimension of samples away, and is a sum over it."""

OF_ALL = {
    *("amax", "amin", "kthvalue", "linalg_norm", "linalg_vector_norm", "logsumexp", "max"),
    *("median", "min", "mode", "nanmedian", "nanquantile", "norm", "prod", "quantile", "std"),
    "var",
}
"""What may take the dimension of samples away, and is no sum over them."""

FUNCTIONS = {
    **{name: name for name in ("cos", "exp", "expm1", "log", "log10", "log1p", "log2", "rsqrt")},
    **{name: name for name in ("sigmoid", "sin", "softplus", "sqrt", "tanh")},
    **dict.fromkeys(("pow", "rpow", "square"), "a power"),
    **dict.fromkeys(("rdiv", "reciprocal", "rtruediv"), "1 / x"),
}
"""What is not linear, and the name of it for people."""

_NORMS = {"linalg_matrix_norm", "linalg_norm", "linalg_vector_norm", "norm"}

_GIVE_ON = {
    *("clone", "contiguous", "cpu", "cuda", "detach", "detach_", "double", "expand", "flatten"),
    *("float", "getitem", "grad", "half", "item", "mean", "neg", "reshape", "select", "squeeze"),
    *("sum", "to", "type", "type_as", "unsqueeze", "view"),
}
"""What gives on its elements, but for their sign, or adds them up."""

LIMITS = {"abs", "clamp", "clamp_max", "clamp_min", "clip", "nan_to_num", "relu"}
"""What gives on its elements, unless these are beyond a limit."""

ADD = {"add", "iadd", "isub", "radd", "rsub", "stack", "sub"}
MULTIPLY, DIVIDE = {"imul", "mul", "multiply", "rmul"}, {"div", "divide", "itruediv", "truediv"}


class Summary(NamedTuple):
    """What has come of samples, and has none any more.

    Attributes:
        name: of what has made it.
        degree: 0 of a mean over samples, and of what is the same in all shards; 1 of a sum; None if
            it is not known.
        function: what it is, if that is neither.
        values: on the replicas, if they are known.
        is_divided: it is a mean over something else, which may be made one over samples again.
    """

    name: str
    degree: int | None = None
    function: str = ""
    values: tuple[Tensor, ...] = ()
    is_divided: bool = False

    @property
    def is_same(self) -> bool:
        """Whether it is the same number in all shards."""
        return bool(self.values) and are_equal(self.values)

    def is_but(self, degree: int) -> str:
        """What it is, if that is not of this degree; empty if it is, or nobody knows."""
        if self.function or self.degree in (None, degree):
            return self.function
        return f"a {'sum' if self.degree == 1 else 'mean'} over samples"


def summary_of(
    traces: Sequence[Trace], values: Sequence[Any], sizes: Sequence[int]
) -> Summary | None:
    """What the same number of all replicas is; None if nothing tells.

    Args:
        traces: of what the replicas did with their shards.
        values: the numbers, as tensors of one element, or as `item` has returned them.
        sizes: of the shards.

    Example:
        >>> def traced(does, shard):
        ...     with Trace(shard) as trace:
        ...         return trace, does(shard)
        >>> shards = torch.arange(5.0).split([3, 2])
        >>> found = [traced(lambda x: x.square().mean().sqrt(), shard) for shard in shards]
        >>> summary_of(*zip(*found), (3, 2)).function
        'sqrt of mean over samples'
        >>> found = [traced(lambda x: x.square().mean() / 2, shard) for shard in shards]
        >>> summary_of(*zip(*found), (3, 2)).degree
        0
    """
    numbers = [trace.number_of(value) for trace, value in zip(traces, values, strict=True)]
    return summary_at(numbers, traces, sizes)


def summary_at(
    numbers: Sequence[int], traces: Sequence[Trace], sizes: Sequence[int]
) -> Summary | None:
    """The same of numbers of the traces."""
    results = [[number] for number in numbers]
    if NO_NUMBER in numbers or len(set(sizes)) < 2:
        return None
    known, made = Summaries(traces, sizes), NO_NUMBER
    for calls in side_by_side(traces, results):
        known.follow(calls)
        made = calls[0].gives[0].number if len(calls[0].gives) == 1 else NO_NUMBER
    return known.summaries.get(made)  # the last of these calls has made them


class Summaries:
    """The numbers of samples, and of summaries of them."""

    def __init__(self, traces: Sequence[Trace], sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._samples: set[int] = set()
        self._picked: set[int] = set()  # some of them, not in proportion to their number
        self.summaries: dict[int, Summary] = {}
        for given in zip(*(trace.shard for trace in traces), strict=False):
            self._note(given)

    def follow(self, calls: Sequence[Call]) -> None:
        """Learns of what the same call gave on all replicas."""
        takes = set(taken_by(calls[0]))
        of_samples = not self._samples.isdisjoint(takes)
        made = self._of_samples(calls) if of_samples else self._of_summaries(calls)
        if of_samples and not self.summaries.keys().isdisjoint(takes):
            made = None
        for given in zip(*(own.gives for own in calls), strict=True):
            number = given[0].number
            for known in (self._samples, self._picked):
                known.discard(number)
            self.summaries.pop(number, None)
            if of_samples:
                self._note(given)
            if made is not None and not differ_in_shape(given):
                own = made._replace(values=_values(given))
                self.summaries[number] = own._replace(degree=0, function="") if own.is_same else own

    def are_samples(self, numbers: Sequence[int]) -> bool:
        """Whether one of these tensors has a dimension that counts samples."""
        return not self._samples.isdisjoint(numbers)

    def _note(self, given: Sequence[Given]) -> None:
        """Notes what is of samples."""
        if not differ_in_shape(given):
            return
        shapes = [own.shape for own in given]
        self._samples.add(given[0].number)
        if len({*map(len, shapes)}) > 1 or not all(
            len({*lengths}) == 1 or grow(lengths, self._sizes)
            for lengths in zip(*shapes, strict=True)
        ):
            self._picked.add(given[0].number)

    def _of_samples(self, calls: Sequence[Call]) -> Summary | None:
        """What a call makes of samples, if it does away with them."""
        name, reductions = _plain(calls[0].name), [own.reduction for own in calls]
        if name in OF_ALL:
            return Summary(name, function=f"{name} over samples")
        known = [own for own in reductions if own is not None]
        is_mean = name == "mean" or any([own.is_mean for own in known])
        if not (is_mean or known or name in _SUMS):
            return None
        weights = [own.weights for own in known if own.weights is not None]
        if weights and degree_of(weights, self._sizes) != 1:
            return Summary(name, function=f"{name} over weights of targets", is_divided=True)
        if is_mean and not weights and not self._picked.isdisjoint(calls[0].takes):
            return Summary(name, function=f"{name} over some samples", is_divided=True)
        return Summary(name, 0 if is_mean else 1)

    def _of_summaries(self, calls: Sequence[Call]) -> Summary | None:
        """What a call makes of summaries and of numbers that are no samples'."""
        name, takes = _plain(calls[0].name), [n for n in taken_by(calls[0]) if n >= 0]
        own = [self.summaries[n] for n in takes if n in self.summaries]
        if not own or len(own) < len(takes):
            return None
        if found := next((summary for summary in own if summary.function), None):
            return found
        first = own[0]
        if name in FUNCTIONS or name in _NORMS:
            function = f"{FUNCTIONS.get(name, 'a norm')} of {first.name} over samples"
            return first._replace(degree=None, function=function)
        if name in _GIVE_ON or (name in LIMITS and self._is_within(calls, first)):
            return first
        if name in ADD:
            return first if {other.degree for other in own} == {0} else first._replace(degree=None)
        if name not in MULTIPLY | DIVIDE:
            return None
        return self._scaled(first, own[1:], calls, -1 if name in DIVIDE else 1)

    def _is_within(self, calls: Sequence[Call], first: Summary) -> bool:
        """Whether a limit has changed nothing on any replica."""
        values = _values([own.gives[0] for own in calls])
        pairs = zip(values, first.values, strict=False)
        return bool(values and first.values) and all([are_equal(pair) for pair in pairs])

    def _scaled(
        self, first: Summary, others: Sequence[Summary], calls: Sequence[Call], sign: int
    ) -> Summary | None:
        """A summary times another one or a number, or divided by it."""
        factors = [own.values for own in others]
        if not factors:
            factors = [
                tuple(map(torch.tensor, values))
                for values in zip(*(own.numbers for own in calls), strict=False)
            ]
        if len(factors) != 1:
            return first._replace(degree=None)
        added = degree_of(factors[0], self._sizes)
        if added is not None and first.degree is not None:
            return first._replace(degree=first.degree + sign * added)
        if added is not None or not others:
            return first._replace(degree=None)
        what = "a ratio" if sign < 0 else "a product"
        with_what = f"{what} of {first.name} and {others[0].name} over samples"
        return first._replace(degree=None, function=with_what)


def _plain(name: str) -> str:
    return name.strip("_")


def _values(given: Sequence[Given]) -> tuple[Tensor, ...]:
    known = [own.value for own in given]
    return tuple(precise(value) for value in known if value is not None and None not in known)
