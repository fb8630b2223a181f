"""Gradients: one loss of the replicas' losses, its backward, and the sums that reach the root.

Decided here: what each replica's loss weighs (`loss`), what the joint loss's backward does
(`backward`), who sums gradients and buffers, and when (`reduce`), and how gradients and hooks are
taken off for a while (`aside`).
"""

from lightning_dp.parallel.gradients.aside import (
    GradientsAside,
    HooksOff,
    clear_gradients,
)
from lightning_dp.parallel.gradients.backward import (
    JointBackward,
    backward_at_once,
    wait_for_autograd,
)
from lightning_dp.parallel.gradients.loss import (
    LOSS_REDUCTIONS,
    Graph,
    LossReduction,
    StepOutput,
    agreed_items,
    items_of,
    join_losses,
    loss_of,
    loss_weights,
)
from lightning_dp.parallel.gradients.reduce import BUFFERS, Buffers, Reducer, reduce_gradients
from lightning_dp.parallel.gradients.snapshot import Snapshot

__all__ = [
    "BUFFERS",
    "LOSS_REDUCTIONS",
    "Buffers",
    "GradientsAside",
    "Graph",
    "HooksOff",
    "JointBackward",
    "LossReduction",
    "Reducer",
    "Snapshot",
    "StepOutput",
    "agreed_items",
    "backward_at_once",
    "clear_gradients",
    "items_of",
    "join_losses",
    "loss_of",
    "loss_weights",
    "reduce_gradients",
    "wait_for_autograd",
]
