"""Split: how many samples of a batch each device gets. Plain numbers alone.

`planner` decides once per batch: it asks the policy that the options name, and keeps to what has
fitted so far and to the fewest samples that a replica can work with. Policies that do not follow
from the batch size alone are in `learning`; what needs more than a division is in `optimal`.
"""

from lightning_dp.parallel.split.learning import Auto as Auto
from lightning_dp.parallel.split.learning import StepUsage as StepUsage
from lightning_dp.parallel.split.optimal import Sizes as Sizes
from lightning_dp.parallel.split.optimal import fitted as fitted
from lightning_dp.parallel.split.planner import OwnSplit as OwnSplit
from lightning_dp.parallel.split.planner import Plan as Plan
from lightning_dp.parallel.split.planner import Planner as Planner
from lightning_dp.parallel.split.planner import SplitPolicy as SplitPolicy
from lightning_dp.parallel.split.planner import check_split as check_split
from lightning_dp.parallel.split.planner import chunk as chunk
from lightning_dp.parallel.split.planner import even as even
from lightning_dp.parallel.split.planner import is_fixed as is_fixed
from lightning_dp.parallel.split.planner import split_policy as split_policy
from lightning_dp.parallel.split.planner import weighted as weighted
