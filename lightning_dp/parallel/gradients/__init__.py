"""Gradients: one loss of the replicas' losses, its backward, and the sums that reach the root.

Decided here: what each replica's loss weighs and what the joint loss's backward does (`loss`, and
what losses are means over, `items`), how it runs on accelerators (`at_once`), who sums gradients
and `buffers`, and when (`reduce`; how, in `slices`; of several processes, `between` them and in
`buffers_between`), what follows if somebody writes to the root's in between (`outside`), which
gradients leave before it has ended (`overlap`, by a `schedule`), and how gradients, hooks and the
values of buffers are set aside for a while (`aside`).
"""

from lightning_dp.parallel.gradients.aside import GradientsAside as GradientsAside
from lightning_dp.parallel.gradients.aside import HooksOff as HooksOff
from lightning_dp.parallel.gradients.aside import Snapshot as Snapshot
from lightning_dp.parallel.gradients.aside import clear_gradients as clear_gradients
from lightning_dp.parallel.gradients.at_once import backward_at_once as backward_at_once
from lightning_dp.parallel.gradients.at_once import wait_for_autograd as wait_for_autograd
from lightning_dp.parallel.gradients.buffers import BUFFERS as BUFFERS
from lightning_dp.parallel.gradients.buffers import Buffers as Buffers
from lightning_dp.parallel.gradients.items import as_told as as_told
from lightning_dp.parallel.gradients.items import items_of as items_of
from lightning_dp.parallel.gradients.items import numbers_of as numbers_of
from lightning_dp.parallel.gradients.items import sum_of_losses as sum_of_losses
from lightning_dp.parallel.gradients.loss import LOSS_REDUCTIONS as LOSS_REDUCTIONS
from lightning_dp.parallel.gradients.loss import Graph as Graph
from lightning_dp.parallel.gradients.loss import JointBackward as JointBackward
from lightning_dp.parallel.gradients.loss import LossReduction as LossReduction
from lightning_dp.parallel.gradients.loss import NoLossError as NoLossError
from lightning_dp.parallel.gradients.loss import StepOutput as StepOutput
from lightning_dp.parallel.gradients.loss import agreed_items as agreed_items
from lightning_dp.parallel.gradients.loss import join_losses as join_losses
from lightning_dp.parallel.gradients.loss import loss_of as loss_of
from lightning_dp.parallel.gradients.loss import loss_weights as loss_weights
from lightning_dp.parallel.gradients.reduce import Reducer as Reducer
from lightning_dp.parallel.gradients.slices import Spread as Spread
from lightning_dp.parallel.gradients.slices import reduce_gradients as reduce_gradients
