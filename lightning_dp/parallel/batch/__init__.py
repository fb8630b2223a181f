"""Batch: what is a batch, how many samples has it, how is it cut, how are outputs joined.

Decided here: which containers there are (`tree`), which leaves can be cut and how (`leaves`), how
many samples a batch has (`sizes`), what one shard of it is (`scatter`), which dimension of an
output counts samples (`sample_dims`), and what the replicas' outputs are together (`gather`, whose
table is in `join`).
"""

from lightning_dp.parallel.batch import tree
from lightning_dp.parallel.batch.cost import sample_costs
from lightning_dp.parallel.batch.gather import TreeJoin, gather
from lightning_dp.parallel.batch.join import (
    Join,
    Scalars,
    as_rows,
    check_overrides,
    weighted_mean,
)
from lightning_dp.parallel.batch.sample_dims import Override, SampleDims, StepDims, judge
from lightning_dp.parallel.batch.scatter import cut_for, scatter
from lightning_dp.parallel.batch.shards import DeviceUsage, Shards
from lightning_dp.parallel.batch.sizes import Inferred, infer_batch_size, infer_for
from lightning_dp.parallel.batch.to_device import to_device

__all__ = [
    "DeviceUsage",
    "Inferred",
    "Join",
    "Override",
    "SampleDims",
    "Scalars",
    "Shards",
    "StepDims",
    "TreeJoin",
    "as_rows",
    "check_overrides",
    "cut_for",
    "gather",
    "infer_batch_size",
    "infer_for",
    "judge",
    "sample_costs",
    "scatter",
    "to_device",
    "tree",
    "weighted_mean",
]
