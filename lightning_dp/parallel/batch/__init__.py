"""Batch: what is a batch, how many samples has it, how is it cut, how are outputs joined.

Decided here: which containers there are (`tree`), which leaves can be cut and how (`leaves`), how
many samples a batch has (`sizes`, by what is `counted`; `lists`) and what they cost (`cost`), what
the `shards` are, which read and cut the plain batches (all others `scatter` cuts), how they are
moved (`to_device`), which dimension of an output counts samples (`sample_dims`), what the replicas'
outputs are together (`gather`, whose table is in `join`), what a step has `added` to its batch, and
what is left of them where the sample is not to count (`without_rows`).
"""

from lightning_dp.parallel.batch import tree as tree
from lightning_dp.parallel.batch.added import give_back_added as give_back_added
from lightning_dp.parallel.batch.cost import no_costs as no_costs
from lightning_dp.parallel.batch.cost import sample_costs as sample_costs
from lightning_dp.parallel.batch.gather import TreeJoin as TreeJoin
from lightning_dp.parallel.batch.gather import check_overrides as check_overrides
from lightning_dp.parallel.batch.gather import gather as gather
from lightning_dp.parallel.batch.gather import override_at as override_at
from lightning_dp.parallel.batch.gather import own_sizes as own_sizes
from lightning_dp.parallel.batch.join import Join as Join
from lightning_dp.parallel.batch.join import Scalars as Scalars
from lightning_dp.parallel.batch.join import as_rows as as_rows
from lightning_dp.parallel.batch.sample_dims import Override as Override
from lightning_dp.parallel.batch.sample_dims import SampleDims as SampleDims
from lightning_dp.parallel.batch.sample_dims import StepDims as StepDims
from lightning_dp.parallel.batch.sample_dims import judge as judge
from lightning_dp.parallel.batch.scatter import scatter as scatter
from lightning_dp.parallel.batch.shards import Shards as Shards
from lightning_dp.parallel.batch.shards import cut_for as cut_for
from lightning_dp.parallel.batch.shards import infer_for as infer_for
from lightning_dp.parallel.batch.shards import warn_of_nothing_to_cut as warn_of_nothing_to_cut
from lightning_dp.parallel.batch.shards import weighted_mean as weighted_mean
from lightning_dp.parallel.batch.sizes import BatchSizeError as BatchSizeError
from lightning_dp.parallel.batch.sizes import Inferred as Inferred
from lightning_dp.parallel.batch.sizes import infer_batch_size as infer_batch_size
from lightning_dp.parallel.batch.to_device import bring as bring
from lightning_dp.parallel.batch.to_device import to_device as to_device
from lightning_dp.parallel.batch.to_device import to_device_together as to_device_together
from lightning_dp.parallel.batch.without_rows import without_rows as without_rows
