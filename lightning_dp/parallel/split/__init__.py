"""Split: how many samples, or which of them, each device gets. Numbers alone.

Decided here: the sizes of a batch's shards by every policy (`policies` names them; `arithmetic` has
the fixed ones, `adaptive` and `memory` learn from `usage`), how many devices work at all (`auto`,
by the times of a `choice`; the best set is searched in `active`; what of it shows without a trial,
`fewer`), and how many samples each of several processes gets (`between`). `planner` asks them once
per batch, and keeps to what fits and to what a replica needs (`least`). No tensor, no device and no
batch comes in here.
"""

from lightning_dp.parallel.split.arithmetic import CostSplit as CostSplit
from lightning_dp.parallel.split.arithmetic import Order as Order
from lightning_dp.parallel.split.arithmetic import Sizes as Sizes
from lightning_dp.parallel.split.arithmetic import SplitPolicy as SplitPolicy
from lightning_dp.parallel.split.arithmetic import batch_order as batch_order
from lightning_dp.parallel.split.arithmetic import by_cost as by_cost
from lightning_dp.parallel.split.arithmetic import chunk as chunk
from lightning_dp.parallel.split.arithmetic import even as even
from lightning_dp.parallel.split.arithmetic import minimax as minimax
from lightning_dp.parallel.split.arithmetic import weighted as weighted
from lightning_dp.parallel.split.auto import Auto as Auto
from lightning_dp.parallel.split.auto import Piece as Piece
from lightning_dp.parallel.split.between import OwnShare as OwnShare
from lightning_dp.parallel.split.between import Rule as Rule
from lightning_dp.parallel.split.between import Shares as Shares
from lightning_dp.parallel.split.between import agreed_shares as agreed_shares
from lightning_dp.parallel.split.between import between_processes as between_processes
from lightning_dp.parallel.split.fewer import FewerDevices as FewerDevices
from lightning_dp.parallel.split.least import at_least as at_least
from lightning_dp.parallel.split.planner import Plan as Plan
from lightning_dp.parallel.split.planner import Planner as Planner
from lightning_dp.parallel.split.policies import OwnSplit as OwnSplit
from lightning_dp.parallel.split.policies import check_split as check_split
from lightning_dp.parallel.split.policies import split_policy as split_policy
from lightning_dp.parallel.split.usage import LearningSplit as LearningSplit
from lightning_dp.parallel.split.usage import StepUsage as StepUsage
