"""Reduce: one loss of the replicas' losses, its backward, and what of it reaches the root.

Decided here: what each replica's loss weighs and how the joint loss's backward runs (`loss`), what
happens around one `backward` and which gradients leave while it runs, how `gradients` are summed
and set aside, which `buffers` the root gets, and when all of this is done (`reducer`).
"""

from lightning_dp.parallel.reduce.buffers import BUFFERS as BUFFERS
from lightning_dp.parallel.reduce.buffers import Buffers as Buffers
from lightning_dp.parallel.reduce.buffers import Snapshot as Snapshot
from lightning_dp.parallel.reduce.gradients import GradientsAside as GradientsAside
from lightning_dp.parallel.reduce.gradients import HooksOff as HooksOff
from lightning_dp.parallel.reduce.gradients import Spread as Spread
from lightning_dp.parallel.reduce.gradients import clear_gradients as clear_gradients
from lightning_dp.parallel.reduce.gradients import reduce_gradients as reduce_gradients
from lightning_dp.parallel.reduce.loss import LOSS_REDUCTIONS as LOSS_REDUCTIONS
from lightning_dp.parallel.reduce.loss import Graph as Graph
from lightning_dp.parallel.reduce.loss import JointBackward as JointBackward
from lightning_dp.parallel.reduce.loss import LossReduction as LossReduction
from lightning_dp.parallel.reduce.loss import NoLossError as NoLossError
from lightning_dp.parallel.reduce.loss import StepOutput as StepOutput
from lightning_dp.parallel.reduce.loss import agreed_items as agreed_items
from lightning_dp.parallel.reduce.loss import as_told as as_told
from lightning_dp.parallel.reduce.loss import backward_at_once as backward_at_once
from lightning_dp.parallel.reduce.loss import items_of as items_of
from lightning_dp.parallel.reduce.loss import join_losses as join_losses
from lightning_dp.parallel.reduce.loss import loss_of as loss_of
from lightning_dp.parallel.reduce.loss import loss_weights as loss_weights
from lightning_dp.parallel.reduce.loss import sum_of_losses as sum_of_losses
from lightning_dp.parallel.reduce.loss import wait_for_autograd as wait_for_autograd
from lightning_dp.parallel.reduce.reducer import Reducer as Reducer
