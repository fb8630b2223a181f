"""Inner gradients: what a step takes itself, by `autograd.grad`, of a mean over its samples.

What a mean over n samples gives to each of them is an n-th of what it would give alone. So a
shard's gradient is larger than the batch's, as many times as the batch has more samples. Of a sum
it is the same. What keeps no scale may follow, as `sign` or `F.normalize`; all else is told.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_dp.parallel.additive.degrees import degree_of
from lightning_dp.parallel.additive.paths import side_by_side
from lightning_dp.parallel.additive.statistics import taken_by
from lightning_dp.parallel.additive.summaries import (
    ADD,
    DIVIDE,
    FUNCTIONS,
    LIMITS,
    MULTIPLY,
    Summaries,
)
from lightning_dp.parallel.additive.traces import Call, Trace

_SCALE_ALONG = {
    *("abs", "amax", "amin", "clone", "contiguous", "detach", "expand", "flatten", "float"),
    *("getitem", "linalg_norm", "linalg_vector_norm", "max", "mean", "median", "min", "neg"),
    *("norm", "permute", "relu", "reshape", "select", "squeeze", "std", "sum", "to", "transpose"),
    *("unsqueeze", "view"),
}
"""What scales as what it takes does."""

_WITHOUT_SCALE = {"cosine_similarity", "normalize", "sgn", "sign"}

_PRODUCTS = {*MULTIPLY, "bmm", "dot", "einsum", "linear", "matmul", "mm", "mv"}

_POWERS = {"rdiv": -1, "reciprocal": -1, "rsqrt": -0.5, "rtruediv": -1, "sqrt": 0.5, "square": 2}

_EPSILON = 1e-4
"""More is not added to a norm, nor is its limit, before something is divided by it."""

UNKNOWN = math.nan


def scaled_gradient(
    traces: Sequence[Trace], results: Sequence[Tensor], sizes: Sequence[int]
) -> str | None:
    """In what a gradient of a mean is used, where results depend on it; None if nothing tells.

    Args:
        traces: of what the replicas did with their shards.
        results: what it returned, one tensor each.
        sizes: of the shards.

    Example:
        >>> def traced(loss, shard):
        ...     with Trace(shard) as trace:
        ...         return trace, loss(shard)
        >>> def penalty(x):
        ...     (g,) = torch.autograd.grad(x.square().mean(), x, create_graph=True)
        ...     return (g.norm(dim=1) - 1).square().mean()
        >>> shards = [torch.ones(n, 2, requires_grad=True) for n in (3, 2)]
        >>> scaled_gradient(*zip(*[traced(penalty, shard) for shard in shards]), (3, 2))
        'sub of a gradient of mean over samples'
    """
    numbers = [[trace.number_of(value)] for trace, value in zip(traces, results, strict=True)]
    known, made = _Scales(traces, sizes), -1
    for calls in side_by_side(traces, numbers):
        if found := known.follow(calls):
            return f"{found} of a gradient of {known.mean} over samples"
        made = calls[0].gives[0].number if len(calls[0].gives) == 1 else -1
    return f"a gradient of {known.mean} over samples" if abs(known.degree(made)) > 0 else None


class _Scales:
    """By which power of a shard's samples numbers scale that are made of gradients of means."""

    def __init__(self, traces: Sequence[Trace], sizes: Sequence[int]) -> None:
        self._sizes, self._summaries = sizes, Summaries(traces, sizes)
        self._degrees: dict[int, float] = {}
        self.mean = "mean"

    def degree(self, number: int) -> float:
        """That of a number; 0 of all that is not known."""
        return self._degrees.get(number, 0.0)

    def follow(self, calls: Sequence[Call]) -> str | None:
        """Learns of what the same call gave on all replicas; where scales are mixed, in what."""
        call, made = calls[0], 0.0
        if call.name == "grad":
            made = self._of_gradient(call)
        elif not self._degrees.keys().isdisjoint(taken_by(call)):
            found = self._made(calls)
            if found is None:
                return call.name.strip("_")
            made = found
        self._summaries.follow(calls)
        for given in call.gives:
            self._degrees.pop(given.number, None)
            if made and given.is_floating:
                self._degrees[given.number] = made
        return None

    def _of_gradient(self, call: Call) -> float:
        """That of a gradient with respect to samples, if it is one of a mean over them."""
        summary = self._summaries.summaries.get(call.takes[0])
        is_mean = summary is not None and summary.degree == 0 and not summary.function
        if summary is None or not is_mean or not self._summaries.are_samples(call.takes[1:]):
            return 0.0
        self.mean = summary.name
        return -1.0

    def _made(self, calls: Sequence[Call]) -> float | None:
        """How the result scales; None where what scales is mixed with what does not."""
        call, name = calls[0], calls[0].name.strip("_")
        degrees = [self.degree(number) for number in taken_by(call)]
        first, are_same = degrees[0], len({*degrees}) == 1
        are_small = all([abs(number) <= _EPSILON for number in call.numbers])
        if any(map(math.isnan, degrees)):
            return UNKNOWN
        if name in ("cat", "stack"):
            return first if are_same else None
        if name in ADD or name in LIMITS - _SCALE_ALONG:
            return first if are_same and are_small else None
        if name in _SCALE_ALONG:
            return first
        if name in _PRODUCTS or name in DIVIDE:
            others = sum(degrees[1:]) + self._of_numbers(calls)
            return first - others if name in DIVIDE else first + others
        if name in _POWERS or (name == "pow" and len(call.numbers) == 1):
            return first * _POWERS.get(name, call.numbers[0] if call.numbers else 1)
        if name in _WITHOUT_SCALE:
            return 0.0
        return None if name in FUNCTIONS else UNKNOWN

    def _of_numbers(self, calls: Sequence[Call]) -> float:
        """Of Python's numbers among the factors, as `len(x)` is."""
        columns = zip(*(own.numbers for own in calls), strict=False)
        values = [[*map(torch.tensor, column)] for column in columns]
        return sum([degree_of(own, self._sizes) or 0 for own in values])
