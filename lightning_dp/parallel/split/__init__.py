"""Split: how many samples, or which of them, each device gets. Numbers alone.

Decided here: the sizes of a batch's shards by every policy (`policies` names them; `arithmetic` has
the fixed ones, `adaptive` and `memory` learn from `usage`), within what `capacity` says that fits.
`planner` asks them, once per batch. No tensor, no device and no batch comes in here.
"""

from lightning_dp.parallel.split.arithmetic import (
    CostSplit,
    Order,
    Sizes,
    SplitPolicy,
    batch_order,
    by_cost,
    chunk,
    even,
    minimax,
    weighted,
)
from lightning_dp.parallel.split.memory import Capacities
from lightning_dp.parallel.split.planner import Plan, Planner
from lightning_dp.parallel.split.policies import OwnSplit, check_split, split_policy
from lightning_dp.parallel.split.usage import LearningSplit, StepUsage

__all__ = [
    "Capacities",
    "CostSplit",
    "LearningSplit",
    "Order",
    "OwnSplit",
    "Plan",
    "Planner",
    "Sizes",
    "SplitPolicy",
    "StepUsage",
    "batch_order",
    "by_cost",
    "check_split",
    "chunk",
    "even",
    "minimax",
    "split_policy",
    "weighted",
]
