"""Additive: whether what shards have adds up to what the batch has; warnings say where it does not.

Decided here: what is told of losses (`own_means`) and of other `outputs`, by the `terms` at the end
of a loss's graph, or where `traces` of `functions` show it: on the `paths` to a result, `relations`
of samples to `statistics` of their shard, or of samples `along` their dimension or in `layers`, and
`inner_gradients` of means; and of numbers, `summaries` that are no means, as the `reductions` of
losses say, too. How it is told is in `findings`, and what follows from shards' sizes in `degrees`.
"""

from lightning_dp.parallel.additive.outputs import has_told_of_related as has_told_of_related
from lightning_dp.parallel.additive.outputs import look_at_outputs as look_at_outputs
from lightning_dp.parallel.additive.own_means import OwnMeans as OwnMeans
from lightning_dp.parallel.additive.summaries import summary_of as summary_of
from lightning_dp.parallel.additive.traces import Trace as Trace
from lightning_dp.parallel.additive.traces import Traces as Traces
