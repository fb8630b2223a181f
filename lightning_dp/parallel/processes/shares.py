"""Shares: what a process's loss weighs in the loss of all processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from lightning_dp.parallel.processes.together import check_together
from lightning_dp.parallel.processes.world import World


class OwnLoss(NamedTuple):
    """The loss of one process's samples.

    Attributes:
        value: the loss; None if no replica has one.
        samples: how many it is of; 0 for an idle process, whose loss weighs nothing.
        items: how many it is a mean over, if not samples.
        has_graph: whether parameters get gradients from it.
        dtype: of the loss.
        writes: whether the step has written to buffers that a next one may read.
    """

    value: float | None
    samples: int
    items: float | None = None
    has_graph: bool = False
    dtype: torch.dtype | None = None
    writes: bool = False


@dataclass(frozen=True)
class JointLoss:
    """The loss of all processes' samples.

    Attributes:
        value: the loss; None if no process has one.
        share: the weight in it of this process's own.
        items: how many it is a mean over, if not samples.
        has_graph: whether some process's parameters get gradients from it.
        dtype: of the loss: the same in every process.
        writes: whether some process's step has written to buffers that a next one may read.
        first: the first process that has samples.
    """

    value: float | None
    share: float = 0.0
    items: float | None = None
    has_graph: bool = False
    dtype: torch.dtype | None = None
    writes: bool = False
    first: int = 0


class Losses:
    """The loss of one step's samples, and those of the other processes once they have been told.

    They are told once, also if the step is done again. Whoever has something else to tell at the
    end of the step may send them along.

    Attributes:
        own: this process's.
        told: those of all processes; None before.
    """

    def __init__(self, own: OwnLoss) -> None:
        self.own = own
        self.told: Sequence[OwnLoss] | None = None

    def join(self, world: World, *, is_sum: bool) -> JointLoss:
        """The loss of all processes; see `join_processes`."""
        if self.told is None:
            told = world.gather(self.own)
            check_together(told)
            self.told = told
        return _joined(self.told, world, is_sum=is_sum)


def join_processes(own: OwnLoss, world: World, *, is_sum: bool) -> JointLoss:
    """The loss of all processes.

    Args:
        own: this process's.
        world: the processes.
        is_sum: whether losses are sums over samples, not means.
    """
    return Losses(own).join(world, is_sum=is_sum)


def _joined(told: Sequence[OwnLoss], world: World, *, is_sum: bool) -> JointLoss:
    writes = any([loss.writes for loss in told])
    first = next((rank for rank, loss in enumerate(told) if loss.samples), 0)
    having = [loss for loss in told if loss.value is not None and loss.samples]
    if not having:
        return JointLoss(None, writes=writes, first=first)
    shares = _shares(told, is_sum=is_sum)
    values = [s * (loss.value or 0.0) for s, loss in zip(shares, told, strict=True) if s]
    items = None if having[0].items is None else sum([loss.items or 0 for loss in having])
    has_graph = any([loss.has_graph for loss in having])
    share, dtype = shares[world.rank], having[0].dtype
    return JointLoss(sum(values), share, items, has_graph, dtype, writes, first)


def _shares(told: Sequence[OwnLoss], *, is_sum: bool) -> list[float]:
    samples = [0 if loss.value is None else loss.samples for loss in told]
    if is_sum:
        return [1.0 if n else 0.0 for n in samples]
    items = [loss.items for loss, n in zip(told, samples, strict=True) if n]
    if items.count(None) not in (0, len(items)):
        raise ValueError(
            f"Expected num_items from every process or from none, got {items}. Give it for every "
            "shard: the number of items that the loss is a mean over."
        )
    counts: list[float] = list(samples)
    if any(items):
        counts = [(loss.items or 0) * bool(n) for loss, n in zip(told, samples, strict=True)]
    return [n / sum(counts) for n in counts]
