"""Reduce: one loss of the replicas' losses, its backward, and what of it reaches the root.

Decided here: what each replica's loss weighs and how the joint loss's backward runs (`loss`); which
gradients leave while a `backward` runs, and how `gradients` are summed; and which buffers the root
gets, and when (`reducer`).
"""

from lightning_dp.parallel.reduce.backward import StashedGradients as StashedGradients
from lightning_dp.parallel.reduce.backward import SuspendedHooks as SuspendedHooks
from lightning_dp.parallel.reduce.gradients import clear_gradients as clear_gradients
from lightning_dp.parallel.reduce.gradients import reduce_gradients as reduce_gradients
from lightning_dp.parallel.reduce.gradients import single_threaded as single_threaded
from lightning_dp.parallel.reduce.loss import LOSS_REDUCTIONS as LOSS_REDUCTIONS
from lightning_dp.parallel.reduce.loss import JointBackward as JointBackward
from lightning_dp.parallel.reduce.loss import LossReduction as LossReduction
from lightning_dp.parallel.reduce.loss import NoLossError as NoLossError
from lightning_dp.parallel.reduce.loss import StepOutput as StepOutput
from lightning_dp.parallel.reduce.loss import agreed_items as agreed_items
from lightning_dp.parallel.reduce.loss import join_losses as join_losses
from lightning_dp.parallel.reduce.loss import loss_of as loss_of
from lightning_dp.parallel.reduce.loss import loss_weights as loss_weights
from lightning_dp.parallel.reduce.loss import parse_outputs as parse_outputs
from lightning_dp.parallel.reduce.loss import wait_for_autograd as wait_for_autograd
from lightning_dp.parallel.reduce.reducer import BUFFERS as BUFFERS
from lightning_dp.parallel.reduce.reducer import Buffers as Buffers
from lightning_dp.parallel.reduce.reducer import BufferSnapshot as BufferSnapshot
from lightning_dp.parallel.reduce.reducer import Reducer as Reducer
