"""Findings: in what samples of a shard meet, and how that is told."""

from __future__ import annotations

from typing import NamedTuple

from lightning_dp.parallel.additive.along import changes_order
from lightning_dp.parallel.additive.functions import FROM_HOST, ONE_OF_MANY
from lightning_dp.parallel.additive.layers import samples_in
from lightning_dp.parallel.additive.terms import FORWARD

NOT_THE_BATCHS = "What shards have of their own samples is not what the batch has."
"""What warnings say of samples that meet."""


BEFORE = f"Compute it before the batch is cut, in on_before_batch_transfer, or use {FORWARD}"
"""What they advise where no graph goes through it."""

PAIRS, A_NUMBER, A_LAYER, A_PLACE = "pairs", "a number", "a layer", "a place"
"""In what else samples meet than in a statistic."""

_MADE_BY = {name: "one of them" for name in ONE_OF_MANY} | {
    name: "numbers of the shard's own, which went through the host" for name in FROM_HOST
}


class Related(NamedTuple):
    """Names of functions: what made the statistic, if it was one, and in what samples met.

    Instead of a statistic it may be `PAIRS` of samples, `A_NUMBER`, `A_PLACE` in the shard, or that
    they meet in `A_LAYER`.
    """

    statistic: str
    met_in: str

    def __str__(self) -> str:
        """For people."""
        if not self.statistic:
            is_order = changes_order(self.met_in)
            return f"{'another order of' if is_order else self.met_in + ' along'} samples"
        if self.statistic == A_LAYER:
            return samples_in(self.met_in)
        if self.statistic == A_PLACE:
            return f"{self.met_in} of samples and of their places in a shard"
        if self.statistic == PAIRS:
            return f"{self.met_in} of pairs of samples"
        if self.statistic == A_NUMBER:
            return f"{self.met_in} of a number that is another one in each shard"
        made_by = _MADE_BY.get(self.statistic, f"{self.statistic} over all of them")
        return f"{self.met_in} of samples and of {made_by}"
