"""What ranks exchange at the end of a training step: their losses, and sums of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_dp.parallel.processes.world import World


class _RankLoss(NamedTuple):
    """What one rank sends of its loss."""

    value: float | None  # of its samples; None if no replica has a loss
    samples: int  # 0 for an idle rank, whose loss weighs nothing
    items: float | None  # what the loss is a mean over, if not samples
    has_graph: bool  # whether parameters get gradients from it
    dtype: torch.dtype | None


class JointLoss(NamedTuple):
    """The loss of all ranks' samples.

    Attributes:
        value: the loss; None if no rank has one.
        share: the weight of this rank's loss.
        items: what it is a mean over, if not samples.
        has_graph: whether any rank's parameters get gradients from it.
        dtype: of the loss, the same in every rank.
        samples: of each rank.
    """

    value: float | None
    share: float
    items: float | None
    has_graph: bool
    dtype: torch.dtype | None
    samples: list[int]

    def on(self, device: torch.device) -> Tensor:
        """The value as a tensor."""
        return torch.tensor(self.value, dtype=self.dtype, device=device)


def exchange_losses(
    loss: Tensor | None,
    samples: int,
    items: float | None,
    world: World,
    *,
    has_graph: bool,
    is_sum: bool,
) -> JointLoss:
    """The loss of all ranks, where this is one rank's.

    Args:
        loss: of the rank's samples; None if there is none.
        samples: how many there are.
        items: what the loss is a mean over, if not samples.
        world: the processes.
        has_graph: whether parameters get gradients from it.
        is_sum: whether losses are sums over samples, not means.
    """
    value, dtype = (None, None) if loss is None else (float(loss), loss.dtype)
    sent = _RankLoss(value, 0 if world.is_idle else samples, items, has_graph, dtype)
    ranks = world.all_gather_objects(sent, "the end of its step")
    sizes = [loss.samples for loss in ranks]
    with_loss = [loss for loss in ranks if loss.value is not None and loss.samples]
    if not with_loss:
        return JointLoss(None, 0.0, None, False, None, sizes)
    of_items = [loss.items for loss in with_loss]
    if of_items.count(None) not in (0, len(of_items)):
        raise ValueError(
            f"Expected num_items from every process or from none, got {of_items}. Give it for "
            "every shard: the number of items that the loss is a mean over."
        )
    # What each rank's loss counts for; like a replica's, see `loss_weights`.
    counts: list[float] = [loss.samples if loss.value is not None else 0 for loss in ranks]
    if is_sum:
        counts = [float(count > 0) for count in counts]
    elif any(of_items):
        counts = [(loss.items or 0) if n else 0 for loss, n in zip(ranks, counts, strict=True)]
    total = 1.0 if is_sum else sum(counts)
    shares = [count / total for count in counts]
    return JointLoss(
        sum([s * (loss.value or 0.0) for s, loss in zip(shares, ranks, strict=True) if s]),
        shares[world.rank],
        None if None in of_items else sum([count or 0 for count in of_items]),
        any([loss.has_graph for loss in with_loss]),
        with_loss[0].dtype,
        sizes,
    )


def sum_gradients(parameters: Sequence[Tensor], world: World) -> None:
    """Makes the gradients of parameters those of all ranks; None where no rank has one."""
    sums = world.sum([parameter.grad for parameter in parameters], parameters)
    for parameter, total in zip(parameters, sums, strict=True):
        parameter.grad = total
