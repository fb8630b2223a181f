"""Terms: how much the elements of a loss's terms count in each shard, as graphs of losses show."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_dp.parallel.gradients import numbers_of
from lightning_dp.parallel.torch_private import Reduced, terms_of

_ROUNDING = 1e-5

_ITEMS = (
    "The mean of these shards is not that of the batch. Return {'loss': loss, 'num_items': what "
    "it is divided by}"
)
FORWARD = "DataParallelStrategy(mode='forward')."
_BY_SIZE = (
    "That follows from how many samples a shard has. Take a number that does not, such as the "
    f"batch_size of the data loader, or use {FORWARD}"
)


class Term(NamedTuple):
    """A term of the loss on all replicas, and how much an element counts in each.

    Attributes:
        terms: what is known of each replica's.
        weights: how much an element counts.
        divisors: by these the weights were divided.
        rounding: numbers may differ by this part of them.
    """

    terms: tuple[Reduced, ...]
    weights: list[float]
    divisors: list[float]
    rounding: float

    @property
    def is_cross_entropy(self) -> bool:
        """Whether it is a mean over the weights of targets."""
        return all([term.is_cross_entropy for term in self.terms])

    @property
    def is_open(self) -> bool:
        """Whether nothing can be told: all counts 0 in a shard, or no shard has any item."""
        return not all(weight > 0 for weight in self.weights) or not any(self.divisors)

    def verdict(self, sizes: Sequence[int]) -> str | None:
        """What is wrong with it; None if it is a mean over samples, or nothing tells."""
        if self.is_open:
            return None
        if self._is_of_parameters:
            return self._by_size("a term of parameters alone", self.weights, sizes)
        is_empty = not all(self.divisors)  # the mean of nothing that a shard has
        shares = [weight * size for weight, size in zip(self.weights, sizes, strict=True)]
        if not (is_empty or differ(shares, self.rounding)):
            return None
        is_divided = is_empty or differ(self.weights, self.rounding)
        return self._divided(sizes) if is_divided else self._sum(sizes)

    @property
    def _is_of_parameters(self) -> bool:
        """Whether no sample has a part in it; as many elements as there are samples are of them."""
        is_as_long = len({term.elements for term in self.terms}) == 1
        return is_as_long and all([term.is_of_parameters for term in self.terms])

    def _by_size(self, what: str, factors: list[float], sizes: Sequence[int]) -> str | None:
        """What is wrong where factors are in proportion to the sizes of shards, or the inverse."""
        pairs = [*zip(factors, sizes, strict=True)]
        ways = [factor * size for factor, size in pairs], [factor / size for factor, size in pairs]
        if not differ(factors, self.rounding) or all(differ(way, self.rounding) for way in ways):
            return None  # some are drawn by each replica, as for mixup
        return f"{what} times {listed(factors)} {_in_shards(sizes)}. {_BY_SIZE}"

    def _divided(self, sizes: Sequence[int]) -> str | None:
        """What is wrong where an element counts another number in each shard."""
        divided = [own / size for size, own in zip(sizes, self.divisors, strict=True)]
        if not differ(divided, self.rounding):
            pairs = zip(self.weights, self.divisors, strict=True)
            return self._by_size("a mean", [weight * own for weight, own in pairs], sizes)
        if self.is_cross_entropy and all(len(term.divisors) == 1 for term in self.terms):
            return cross_entropy_over(self.divisors, sizes)
        divisors = listed(1 / weight for weight in self.weights)
        return (
            f"a sum divided by {divisors} {_in_shards(sizes)}. {_ITEMS}. Where elements are of "
            f"several samples, as pairs are, use {FORWARD}"
        )

    def _sum(self, sizes: Sequence[int]) -> str | None:
        """What is wrong where an element counts the same in all shards."""
        elements = [term.elements for term in self.terms]
        if len(set(elements)) == 1 or any(term.is_weighted for term in self.terms):
            return None
        if self.is_cross_entropy and not differ(self.divisors, self.rounding):
            return None  # what is divided by the same everywhere does not follow from the samples
        return (
            f"a sum of {listed(elements)} elements {_in_shards(sizes)}. Divide it by the number of "
            "samples that the step gets. For a loss that is a sum throughout, use "
            f"DataParallelStrategy(loss_reduction='sum'); for others, {FORWARD}"
        )


def cross_entropy_over(weights: Sequence[float], sizes: Sequence[int]) -> str:
    """What is wrong with means over weights that do not follow the sizes of shards."""
    return (
        f"a cross entropy that is a mean over weights of targets: {listed(weights)} "
        f"{_in_shards(sizes)}. {_ITEMS}, that is weight[target].sum() without ignored targets, or "
        f"use {FORWARD}"
    )


def terms_of_all(losses: Sequence[Tensor]) -> list[Term]:
    """The terms of the replicas' losses, if all have as many."""
    of_replicas = list(map(terms_of, losses))
    if len({*map(len, of_replicas)}) > 1:
        return []
    together = [*zip(*of_replicas, strict=True)]
    factors = [n for terms in together for t in terms for n in (*t.weights, *t.divisors)]
    numbers = iter(numbers_of(factors))
    rounding = max(_ROUNDING, 4 * torch.finfo(losses[0].dtype).eps)
    return [_term(terms, numbers, rounding) for terms in together]


def _term(terms: tuple[Reduced, ...], numbers: Iterator[float], rounding: float) -> Term:
    """A term, by the values of its factors; what is divided by 0 counts infinitely."""
    weights, divisors = [], []
    for term in terms:
        weight = abs(math.prod(next(numbers) for _ in term.weights))
        divisor = abs(math.prod(next(numbers) for _ in term.divisors))
        divisors.append(divisor)
        weights.append(weight / divisor if divisor else weight * math.inf)
    return Term(terms, weights, divisors, rounding)


def differ(values: Sequence[float], rounding: float = _ROUNDING) -> bool:
    """Whether numbers are not the same, but for rounding."""
    return max(values) - min(values) > rounding * max(map(abs, values))


def listed(numbers: Iterable[float]) -> str:
    """Numbers for people."""
    return ", ".join(f"{number:.6g}" for number in numbers)


def _in_shards(sizes: Sequence[int]) -> str:
    return f"in shards of {listed(sizes)} samples"
