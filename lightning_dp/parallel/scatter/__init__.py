"""Scatter: reads, counts, cuts and moves batches.

`shards` counts, cuts and moves a batch; most batches need no more. `batch_size` decides what the
samples of any other batch are, and what they cost; `tree` knows its leaves and containers.
"""

from lightning_dp.parallel.scatter import tree as tree
from lightning_dp.parallel.scatter.batch_size import BatchSizeError as BatchSizeError
from lightning_dp.parallel.scatter.batch_size import Inferred as Inferred
from lightning_dp.parallel.scatter.batch_size import are_alike as are_alike
from lightning_dp.parallel.scatter.batch_size import infer_batch_size as infer_batch_size
from lightning_dp.parallel.scatter.batch_size import sample_costs as sample_costs
from lightning_dp.parallel.scatter.shards import Override as Override
from lightning_dp.parallel.scatter.shards import RowRules as RowRules
from lightning_dp.parallel.scatter.shards import Shards as Shards
from lightning_dp.parallel.scatter.shards import cut_for as cut_for
from lightning_dp.parallel.scatter.shards import infer_for as infer_for
from lightning_dp.parallel.scatter.shards import scatter as scatter
from lightning_dp.parallel.scatter.shards import to_device as to_device
from lightning_dp.parallel.scatter.shards import to_device_together as to_device_together
from lightning_dp.parallel.scatter.shards import warn_of_nothing_to_cut as warn_of_nothing_to_cut
from lightning_dp.parallel.scatter.shards import weighted_mean as weighted_mean
from lightning_dp.parallel.scatter.tree import move as move
