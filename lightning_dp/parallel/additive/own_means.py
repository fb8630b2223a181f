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
from typing import Any

from lightning_dp.parallel.additive.relations import NOT_THE_BATCHS, has_told_of_related, related
from lightning_dp.parallel.additive.summaries import summary_of
from lightning_dp.parallel.additive.terms import (
    FORWARD,
    Term,
    cross_entropy_over,
    differ,
    terms_of_all,
)
from lightning_dp.parallel.additive.traces import Trace, Traces
from lightning_dp.parallel.gradients import Graph, LossReduction, numbers_of
from lightning_dp.parallel.torch_losses import divisors_of_means
from lightning_dp.parallel.torch_mixing import mixed_samples

_BEFORE = f"Compute it before the batch is cut, in on_before_batch_transfer, or use {FORWARD}"


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
    """

    def __init__(self, loss_reduction: LossReduction) -> None:
        first = 0.0 if loss_reduction == "mean" else math.inf
        self.rest: defaultdict[tuple[str, int], float] = defaultdict(lambda: first)
        self._looked_at: defaultdict[tuple[str, int], int] = defaultdict(lambda: 1)
        self._traced_for: defaultdict[tuple[str, int], int] = defaultdict(int)
        self._asked_for: defaultdict[tuple[str, int], int] = defaultdict(int)
        self._has_told_of_none = False

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
        got = got or _cross_entropy(graphs, sizes, terms) or _mixed(graphs, sizes)
        got = got or _related(graphs, sizes, traces)
        if got is not None:
            self.rest[key], self._traced_for[key] = math.inf, self._looked_at[key]
            warnings.warn(
                f"{key[0]}: expected a loss that is a mean over samples, got {got}", stacklevel=2
            )


def look_at_outputs(
    step: str, outputs: Sequence[Any], traces: Sequence[Trace], sizes: Sequence[int]
) -> None:
    """Warns where what a step of evaluation returns is not of each sample by itself."""
    has_told_of_related(step, traces, outputs, sizes, _BEFORE)


def _mixed(graphs: Sequence[Graph], sizes: Sequence[int]) -> str | None:
    mixed = mixed_samples([graph.loss for graph in graphs], sizes)
    if mixed is None:
        return None
    sample = "Take it of each sample, or use" if mixed.is_function else "Use"
    return f"{mixed.what}. {NOT_THE_BATCHS} {sample} {FORWARD}"


def _related(graphs: Sequence[Graph], sizes: Sequence[int], traces: Traces | None) -> str | None:
    own = [] if traces is None else traces.of([graph.replica for graph in graphs])
    if len(own) < len(graphs):
        return None
    found = related(own, [[graph.loss] for graph in graphs], sizes)
    if found is not None:
        return f"{found}, which has no gradient. {NOT_THE_BATCHS} {_BEFORE}"
    summary = summary_of(own, [graph.loss for graph in graphs], sizes)
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
