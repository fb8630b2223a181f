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
from collections.abc import Sequence

from torch import Tensor

from lightning_dp.parallel.additive.findings import A_LAYER, BEFORE, NOT_THE_BATCHS
from lightning_dp.parallel.additive.functions import AT_PLACES_OF
from lightning_dp.parallel.additive.inner_gradients import scaled_gradient
from lightning_dp.parallel.additive.relations import decided, related
from lightning_dp.parallel.additive.summaries import summary_of
from lightning_dp.parallel.additive.terms import (
    FORWARD,
    Term,
    cross_entropy_over,
    differ,
    terms_of_all,
)
from lightning_dp.parallel.additive.traces import Trace, Traces
from lightning_dp.parallel.batch import tree
from lightning_dp.parallel.gradients import Graph, LossReduction, numbers_of
from lightning_dp.parallel.torch_private import divisors_of_means, mixed_samples


class OwnMeans:
    """Looks at the losses of a few batches that several replicas share, and warns once.

    These are the first, the 16th, the 256th, and so on, which are cut unequally on purpose, since
    padding may come later. Where a shard had no item at all the next look comes at twice as many
    batches. A look takes a walk through the graphs of all replicas, and a wait.

    Args:
        loss_reduction: nothing is looked at where a loss is to be a sum.

    Attributes:
        rest: how many losses are left out before the next look, by the method that returns them and
            which of its losses they are.
        told: outputs beside losses of which was told; see `look_at_outputs`.
    """

    def __init__(self, loss_reduction: LossReduction) -> None:
        first = 0.0 if loss_reduction == "mean" else math.inf
        self.rest: defaultdict[tuple[str, int], float] = defaultdict(lambda: first)
        self._looked_at: defaultdict[tuple[str, int], int] = defaultdict(lambda: 1)
        self._traced_for: defaultdict[tuple[str, int], int] = defaultdict(int)
        self._asked_for: defaultdict[tuple[str, int], int] = defaultdict(int)
        self._has_told_of_none = False
        self.told = set[tuple[str, tree.Path]]()

    def asks(self, key: tuple[str, int]) -> bool:
        """Whether shards are to be unequal, for a look that is due: once for each look."""
        is_new = self._asked_for[key] != self._looked_at[key]
        self._asked_for[key] = self._looked_at[key]
        return is_new

    def is_traced(self, key: tuple[str, int], sizes: Sequence[int]) -> bool:
        """Whether a step is to be traced for a look, in shards of these sizes: once for each look.

        That may not come: the step's output may have `num_items`.
        """
        if len(set(sizes)) < 2 or self._traced_for[key] == self._looked_at[key]:
            return False
        self._traced_for[key] = self._looked_at[key]
        return True

    def tell_of_none(self, step: str, count: int, of: int) -> None:
        """Warns once of replicas that return no loss where others do."""
        if not self._has_told_of_none:
            self._has_told_of_none = True
            warnings.warn(
                f"{step}: expected a loss from every replica or from none, got None from {count} "
                f"of {of}. Their samples are left out; one device leaves out the whole batch. Let "
                f"all decide alike, by what self.all_gather(...) returns, or use {FORWARD}",
                stacklevel=2,
            )

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
        terms = terms_of_all([graph.loss for graph in graphs])
        now, factor = self._looked_at[key], 2 if any(term.is_open for term in terms) else 16
        self._looked_at[key], self.rest[key] = now * factor, now * factor - now - 1
        got = next(filter(None, [term.verdict(sizes) for term in terms]), None)
        got = got or _cross_entropy(graphs, sizes, terms) or _met(graphs, sizes, traces)
        if got is not None:
            self.rest[key], self._traced_for[key] = math.inf, self._looked_at[key]
            warnings.warn(
                f"{key[0]}: expected a loss that is a mean over samples, got {got}", stacklevel=2
            )


def _met(graphs: Sequence[Graph], sizes: Sequence[int], traces: Traces | None) -> str | None:
    """In what samples meet: what a layer is told of says most, and then a graph."""
    losses = [graph.loss for graph in graphs]
    own = [] if traces is None else traces.of([graph.replica for graph in graphs])
    is_traced = len(own) == len(graphs)
    if is_traced and (what := decided(own, sizes)) is not None:
        return f"a decision of the host by {what}, which is not the same for all. {BEFORE}"
    found = related(own, [[loss] for loss in losses], sizes) if is_traced else None
    if found is not None and found.statistic == A_LAYER:
        return f"{found}. {NOT_THE_BATCHS} Give it each sample by itself."
    if (mixed := mixed_samples(losses, sizes)) is not None:
        sample = "Take it of each sample, or use" if mixed.is_function else "Use"
        return f"{mixed.what}. {NOT_THE_BATCHS} {sample} {FORWARD}"
    if found is not None:
        gap = "" if found.statistic in AT_PLACES_OF else ", which has no gradient"
        return f"{found}{gap}. {NOT_THE_BATCHS} {BEFORE}"
    return _of_numbers(own, losses, sizes) if is_traced else None


def _of_numbers(
    traces: Sequence[Trace], losses: Sequence[Tensor], sizes: Sequence[int]
) -> str | None:
    if (scaled := scaled_gradient(traces, losses, sizes)) is not None:
        return f"{scaled}. {NOT_THE_BATCHS} Take the gradient of their sum, or use {FORWARD}"
    summary = summary_of(traces, losses, sizes)
    if summary is None or not summary.function or summary.is_divided:
        return None
    return f"{summary.function}. {NOT_THE_BATCHS} Use {FORWARD}"


def _cross_entropy(
    graphs: Sequence[Graph], sizes: Sequence[int], terms: Sequence[Term]
) -> str | None:
    """What is wrong with means of `cross_entropy`, if not all of them are among the terms."""
    divisors = [divisors_of_means(graph.loss) for graph in graphs]
    count = len(divisors[0])
    are_terms = sum([term.is_cross_entropy for term in terms]) == count
    if are_terms or any(len(own) != count for own in divisors):
        return None
    numbers = numbers_of([divisor for own in divisors for divisor in own])
    for own in (numbers[i::count] for i in range(count)):
        ratios = [number / size for number, size in zip(own, sizes, strict=True)]
        if differ(ratios) and differ(own):
            return cross_entropy_over(own, sizes)
    return None
