"""Split: how many samples of a batch, or which of them, each device gets. Plain numbers alone.

`planner` decides once per batch. It asks the policy that the options name (`policies`), and keeps
to what has fitted so far and to the fewest samples that a replica can work with. Fixed policies are
functions of `arithmetic`; `adaptive`, `memory` and `auto` learn from what the devices did.
"""

from lightning_dp.parallel.split.adaptive import Adaptive as Adaptive
from lightning_dp.parallel.split.adaptive import StepUsage as StepUsage
from lightning_dp.parallel.split.arithmetic import Order as Order
from lightning_dp.parallel.split.arithmetic import Sizes as Sizes
from lightning_dp.parallel.split.arithmetic import SplitPolicy as SplitPolicy
from lightning_dp.parallel.split.arithmetic import batch_order as batch_order
from lightning_dp.parallel.split.arithmetic import by_cost as by_cost
from lightning_dp.parallel.split.arithmetic import chunk as chunk
from lightning_dp.parallel.split.arithmetic import even as even
from lightning_dp.parallel.split.arithmetic import fitted as fitted
from lightning_dp.parallel.split.arithmetic import minimax as minimax
from lightning_dp.parallel.split.arithmetic import weighted as weighted
from lightning_dp.parallel.split.auto import Auto as Auto
from lightning_dp.parallel.split.auto import Timing as Timing
from lightning_dp.parallel.split.memory import Memory as Memory
from lightning_dp.parallel.split.planner import CostSplit as CostSplit
from lightning_dp.parallel.split.planner import Plan as Plan
from lightning_dp.parallel.split.planner import Planner as Planner
from lightning_dp.parallel.split.policies import OwnSplit as OwnSplit
from lightning_dp.parallel.split.policies import check_split as check_split
from lightning_dp.parallel.split.policies import is_fixed as is_fixed
from lightning_dp.parallel.split.policies import split_policy as split_policy
