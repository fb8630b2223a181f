"""Scatter: reads, counts, cuts and moves batches.

Decided here: which containers there are (`tree`), which leaves can be cut and how (`leaves`), how a
batch is read (`read`), cut and moved (`shards`), and what its samples `cost`.
"""

from lightning_dp.parallel.scatter import tree as tree
from lightning_dp.parallel.scatter.cost import no_costs as no_costs
from lightning_dp.parallel.scatter.cost import sample_costs as sample_costs
from lightning_dp.parallel.scatter.leaves import TENSORS as TENSORS
from lightning_dp.parallel.scatter.leaves import LeafType as LeafType
from lightning_dp.parallel.scatter.leaves import is_array as is_array
from lightning_dp.parallel.scatter.leaves import leaf_type as leaf_type
from lightning_dp.parallel.scatter.leaves import move as move
from lightning_dp.parallel.scatter.leaves import pick as pick
from lightning_dp.parallel.scatter.leaves import register_leaf_type as register_leaf_type
from lightning_dp.parallel.scatter.leaves import size_of as size_of
from lightning_dp.parallel.scatter.read import BatchSizeError as BatchSizeError
from lightning_dp.parallel.scatter.read import Inferred as Inferred
from lightning_dp.parallel.scatter.read import are_alike as are_alike
from lightning_dp.parallel.scatter.read import infer_batch_size as infer_batch_size
from lightning_dp.parallel.scatter.read import infer_for as infer_for
from lightning_dp.parallel.scatter.shards import OVERRIDES as OVERRIDES
from lightning_dp.parallel.scatter.shards import Override as Override
from lightning_dp.parallel.scatter.shards import RowRules as RowRules
from lightning_dp.parallel.scatter.shards import Shards as Shards
from lightning_dp.parallel.scatter.shards import cut_for as cut_for
from lightning_dp.parallel.scatter.shards import scatter as scatter
from lightning_dp.parallel.scatter.shards import to_device as to_device
from lightning_dp.parallel.scatter.shards import to_device_together as to_device_together
from lightning_dp.parallel.scatter.shards import warn_of_nothing_to_cut as warn_of_nothing_to_cut
from lightning_dp.parallel.scatter.shards import weighted_mean as weighted_mean
