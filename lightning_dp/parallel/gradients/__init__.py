"""Gradients: one loss of the replicas' losses, its backward, and the sums that reach the root.

Decided here: what each replica's loss weighs (`loss`), what happens before and after a backward
(`backward`), who sums gradients and buffers (`reduce`), and that hooks of parameters see the sum
(`hooks`).
"""

from lightning_dp.parallel.gradients.backward import Backward, wait_for_autograd
from lightning_dp.parallel.gradients.loss import (
    LOSS_REDUCTIONS,
    LossReduction,
    StepOutput,
    agreed_items,
    items_of,
    join_losses,
    loss_of,
    loss_weights,
    with_separate_backward,
)
from lightning_dp.parallel.gradients.reduce import (
    BUFFERS,
    Buffers,
    EarlierGradients,
    reduce_gradients,
)

__all__ = [
    "BUFFERS",
    "LOSS_REDUCTIONS",
    "Backward",
    "Buffers",
    "EarlierGradients",
    "LossReduction",
    "StepOutput",
    "agreed_items",
    "items_of",
    "join_losses",
    "loss_of",
    "loss_weights",
    "reduce_gradients",
    "wait_for_autograd",
    "with_separate_backward",
]
