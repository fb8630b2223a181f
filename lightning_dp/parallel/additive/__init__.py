"""Additive: whether what shards have adds up to what the batch has; warnings say where it does not.

Decided here: what is told of losses and of outputs (`own_means`), by the `terms` at the end of a
loss's graph, or where `traces` of steps show it: on the `paths` to a result, `relations` of samples
to a statistic of their shard, or of samples `along` their dimension; and of numbers, `summaries`
that are no means, as the `reductions` of losses say, too. What follows from the sizes of shards has
`degrees`.
"""

from lightning_dp.parallel.additive.own_means import OwnMeans as OwnMeans
from lightning_dp.parallel.additive.own_means import look_at_outputs as look_at_outputs
from lightning_dp.parallel.additive.relations import has_told_of_related as has_told_of_related
from lightning_dp.parallel.additive.summaries import summary_of as summary_of
from lightning_dp.parallel.additive.traces import Traces as Traces
