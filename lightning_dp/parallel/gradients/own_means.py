"""Own means: losses that are means over something else than samples, as their graphs show.

`cross_entropy` and `nll_loss` divide by the weights of their targets. With class weights, or where
`ignore_index` leaves some out, shards of as many samples may weigh differently. Then the mean of
the shards' means is not that of the batch, and nothing else would say so.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from lightning_dp.parallel.gradients.items import numbers_of
from lightning_dp.parallel.gradients.loss import Graph
from lightning_dp.parallel.torch_losses import divisors_of_means

LOOKS = 1
"""Batches that are looked at: it takes a walk through the graphs of all replicas, and a wait.

The first one is cut unequally on purpose.
"""

_ROUNDING = 1e-5


class OwnMeans:
    """Looks at the losses of the first batch that several replicas share, and warns."""

    def __init__(self) -> None:
        self.looks_left = LOOKS

    def look(self, name: str, graphs: Sequence[Graph], sizes: Sequence[int]) -> None:
        """Compares what the replicas' losses were divided by with their samples.

        What is divided by the same everywhere does not follow from a shard's samples.

        Args:
            name: the method that has returned the losses.
            graphs: the replicas' losses.
            sizes: of their shards.
        """
        if len(graphs) < 2:
            return
        self.looks_left -= 1
        divisors = [divisors_of_means(graph.loss) for graph in graphs]
        count = len(divisors[0])
        if any(len(own) != count for own in divisors):
            return
        numbers = numbers_of([divisor for own in divisors for divisor in own])
        for i in range(count):
            own = numbers[i::count]
            ratios = [number / size for number, size in zip(own, sizes, strict=True)]
            if _differ(ratios) and _differ(own):
                _tell(name, own, sizes)
                return


def _differ(values: Sequence[float]) -> bool:
    return max(values) - min(values) > _ROUNDING * max(map(abs, values))


def _tell(name: str, divisors: Sequence[float], sizes: Sequence[int]) -> None:
    told = ", ".join(f"{number:.6g}" for number in divisors)
    warnings.warn(
        f"{name}: expected a loss that is a mean over samples, got a cross entropy that is a mean "
        f"over weights of targets: {told} in shards of {', '.join(map(str, sizes))} samples. The "
        "mean of these shards is not that of the batch. Return {'loss': loss, 'num_items': what "
        "it is divided by}, that is weight[target].sum() without ignored targets, or use "
        "DataParallelStrategy(mode='forward').",
        stacklevel=2,
    )
