"""Gather: what one device would have returned, of the replicas' outputs."""

from lightning_dp.parallel.gather.gather import GatherError as GatherError
from lightning_dp.parallel.gather.gather import Join as Join
from lightning_dp.parallel.gather.gather import Scalars as Scalars
from lightning_dp.parallel.gather.gather import are_per_shard as are_per_shard
from lightning_dp.parallel.gather.gather import as_rows as as_rows
from lightning_dp.parallel.gather.gather import check_overrides as check_overrides
from lightning_dp.parallel.gather.gather import fit_shapes as fit_shapes
from lightning_dp.parallel.gather.gather import gather as gather
from lightning_dp.parallel.gather.gather import pad as pad
from lightning_dp.parallel.gather.gather import without_rows as without_rows
from lightning_dp.parallel.scatter import Override as Override
from lightning_dp.parallel.scatter import RowRules as RowRules
