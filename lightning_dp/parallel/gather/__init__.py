"""Gather: what one device would have returned, of the replicas' outputs.

Decided here: how outputs are brought together (`gather`) and joined (`join`).
"""

from lightning_dp.parallel.gather.gather import check_overrides as check_overrides
from lightning_dp.parallel.gather.gather import gather as gather
from lightning_dp.parallel.gather.gather import own_sizes as own_sizes
from lightning_dp.parallel.gather.gather import without_rows as without_rows
from lightning_dp.parallel.gather.join import Join as Join
from lightning_dp.parallel.gather.join import Scalars as Scalars
from lightning_dp.parallel.gather.join import add_up as add_up
from lightning_dp.parallel.gather.join import as_rows as as_rows
from lightning_dp.parallel.gather.join import fit_shapes as fit_shapes
from lightning_dp.parallel.gather.join import pad as pad
from lightning_dp.parallel.scatter import Override as Override
from lightning_dp.parallel.scatter import RowRules as RowRules
