"""Own means: losses that are no means over samples, as their graphs show.

The mean of the shards' losses, weighted by their samples, is the loss of the batch if each sample
counts equally in it. In a sum it does not, nor in a mean over something else (valid tokens, boxes,
pairs, weights of targets), nor in what mixes samples, such as a function of a mean. Nothing else
would say so.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from lightning_dp.parallel.gradients.items import numbers_of
from lightning_dp.parallel.gradients.loss import Graph, LossReduction
from lightning_dp.parallel.gradients.relations import NOT_THE_BATCHS, related
from lightning_dp.parallel.gradients.traces import Traces
from lightning_dp.parallel.torch_losses import Reduced, divisors_of_means, terms_of
from lightning_dp.parallel.torch_mixing import mixed_samples

_ROUNDING = 1e-5

_ITEMS = (
    "The mean of these shards is not that of the batch. Return {'loss': loss, 'num_items': what "
    "it is divided by}"
)
_FORWARD = "DataParallelStrategy(mode='forward')."


class _Term(NamedTuple):
    """A term of the loss on all replicas, and how much an element counts in each."""

    terms: tuple[Reduced, ...]
    weights: list[float]
    divisors: list[float]  # by which these were divided
    rounding: float

    @property
    def is_open(self) -> bool:
        """Whether nothing can be told: all counts 0 in a shard, or no shard has any item."""
        return not all(weight > 0 for weight in self.weights) or not any(self.divisors)

    def verdict(self, sizes: Sequence[int]) -> str | None:
        """What is wrong with it; None if it is a mean over samples, or nothing tells."""
        weights = self.weights
        if self.is_open:
            return None
        shares = [weight * size for weight, size in zip(weights, sizes, strict=True)]
        is_empty = not all(self.divisors)  # the mean of nothing that a shard has
        if not (is_empty or _differ(shares, self.rounding)):
            return None
        shards = f"in shards of {_listed(sizes)} samples"
        if is_empty or _differ(weights, self.rounding):
            divided = [own / size for size, own in zip(sizes, self.divisors, strict=True)]
            if not _differ(divided, self.rounding):
                return None  # a mean, times what each replica has drawn, as for mixup
            divisors = _listed(1 / weight for weight in weights)
            return (
                f"a sum divided by {divisors} {shards}. {_ITEMS}. Where elements are of several "
                f"samples, as pairs are, use {_FORWARD}"
            )
        elements = [term.elements for term in self.terms]
        if len(set(elements)) == 1 or any(term.is_weighted for term in self.terms):
            return None
        return (
            f"a sum of {_listed(elements)} elements {shards}. Divide it by the number of samples "
            "that the step gets. For a loss that is a sum throughout, use "
            f"DataParallelStrategy(loss_reduction='sum'); for others, {_FORWARD}"
        )


class OwnMeans:
    """Looks at the losses of a few batches that several replicas share, and warns once.

    These are the first, which is cut unequally on purpose, the 16th, the 256th, and so on, since
    padding may come later. Where a shard had no item at all the next look comes at twice as many
    batches. A look takes a walk through the graphs of all replicas, and a wait.

    Args:
        loss_reduction: nothing is looked at where a loss is to be a sum.

    Attributes:
        rest: how many losses are left out before the next look, by the method that returns them and
            which of its losses they are.
    """

    def __init__(self, loss_reduction: LossReduction) -> None:
        first = 0.0 if loss_reduction == "mean" else math.inf
        self.rest: defaultdict[tuple[str, int], float] = defaultdict(lambda: first)
        self._looked_at: defaultdict[tuple[str, int], int] = defaultdict(lambda: 1)
        self._traced_for: defaultdict[tuple[str, int], int] = defaultdict(int)

    def is_traced(self, key: tuple[str, int], sizes: Sequence[int]) -> bool:
        """Whether a step is to be traced for a look, in shards of these sizes: once for each look.

        That may not come: the step's output may have `num_items`.
        """
        if len(set(sizes)) < 2 or self._traced_for[key] == self._looked_at[key]:
            return False
        self._traced_for[key] = self._looked_at[key]
        return True

    def look(
        self,
        key: tuple[str, int],
        graphs: Sequence[Graph],
        sizes: Sequence[int],
        traces: Traces | None = None,
    ) -> None:
        """Compares how the replicas' losses are put together with their samples.

        What is divided by the same everywhere does not follow from a shard's samples.

        Args:
            key: the method that the losses are of, and which of its losses they are.
            graphs: the replicas' losses.
            sizes: of their shards.
            traces: of the steps that returned them, if they were traced.
        """
        if len(graphs) < 2:
            return
        terms = _terms(graphs)
        now, factor = self._looked_at[key], 2 if any(term.is_open for term in terms) else 16
        self._looked_at[key], self.rest[key] = now * factor, now * factor - now - 1
        got = _cross_entropy(graphs, sizes)
        if got is None:
            verdicts = (term.verdict(sizes) for term in terms)
            got = next(filter(None, verdicts), None) or _mixed(graphs, sizes)
            got = got or _related(graphs, sizes, traces)
        if got is not None:
            self.rest[key] = math.inf
            warnings.warn(
                f"{key[0]}: expected a loss that is a mean over samples, got {got}", stacklevel=2
            )


def _mixed(graphs: Sequence[Graph], sizes: Sequence[int]) -> str | None:
    mixed = mixed_samples([graph.loss for graph in graphs], sizes)
    if mixed is None:
        return None
    sample = "Take it of each sample, or use" if mixed.is_function else "Use"
    return f"{mixed.what}. {NOT_THE_BATCHS} {sample} {_FORWARD}"


def _related(graphs: Sequence[Graph], sizes: Sequence[int], traces: Traces | None) -> str | None:
    own = [] if traces is None else traces.of([graph.replica for graph in graphs])
    if len(own) < len(graphs):
        return None
    found = related(own, [[graph.loss] for graph in graphs], sizes)
    if found is None:
        return None
    return (
        f"{found}, which has no gradient. {NOT_THE_BATCHS} Compute it before the batch is cut, in "
        f"on_before_batch_transfer, or use {_FORWARD}"
    )


def _cross_entropy(graphs: Sequence[Graph], sizes: Sequence[int]) -> str | None:
    divisors = [divisors_of_means(graph.loss) for graph in graphs]
    count = len(divisors[0])
    if any(len(own) != count for own in divisors):
        return None
    numbers = numbers_of([divisor for own in divisors for divisor in own])
    for own in (numbers[i::count] for i in range(count)):
        ratios = [number / size for number, size in zip(own, sizes, strict=True)]
        if _differ(ratios) and _differ(own):
            return (
                f"a cross entropy that is a mean over weights of targets: {_listed(own)} in shards "
                f"of {_listed(sizes)} samples. {_ITEMS}, that is weight[target].sum() without "
                f"ignored targets, or use {_FORWARD}"
            )
    return None


def _terms(graphs: Sequence[Graph]) -> list[_Term]:
    """The terms of the replicas' losses, if all have as many."""
    of_replicas = [terms_of(graph.loss) for graph in graphs]
    if len({*map(len, of_replicas)}) > 1:
        return []
    together = [*zip(*of_replicas, strict=True)]
    factors = [n for terms in together for t in terms for n in (*t.weights, *t.divisors)]
    numbers = iter(numbers_of(factors))
    rounding = max(_ROUNDING, 4 * torch.finfo(graphs[0].loss.dtype).eps)
    return [_term(terms, numbers, rounding) for terms in together]


def _term(terms: tuple[Reduced, ...], numbers: Iterator[float], rounding: float) -> _Term:
    """A term, by the values of its factors; what is divided by 0 counts infinitely."""
    weights, divisors = [], []
    for term in terms:
        weight = abs(math.prod(next(numbers) for _ in term.weights))
        divisor = abs(math.prod(next(numbers) for _ in term.divisors))
        divisors.append(divisor)
        weights.append(weight / divisor if divisor else weight * math.inf)
    return _Term(terms, weights, divisors, rounding)


def _differ(values: Sequence[float], rounding: float = _ROUNDING) -> bool:
    return max(values) - min(values) > rounding * max(map(abs, values))


def _listed(numbers: Iterable[float]) -> str:
    return ", ".join(f"{number:.6g}" for number in numbers)
