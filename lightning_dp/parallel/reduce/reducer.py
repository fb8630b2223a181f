"""Reducer: brings gradients and buffers from the replicas to the root, at the right time.

Gradients are summed, not averaged: the losses' weights are already in them. With several processes
the ranks' sum follows the local one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor

from lightning_dp.parallel.comm import can_be_packed
from lightning_dp.parallel.reduce.backward import Backward
from lightning_dp.parallel.reduce.gradients import GRAD, reduce_gradients
from lightning_dp.parallel.reduce.loss import JointBackward, wait_for_autograd
from lightning_dp.parallel.replicate import Replicas
from lightning_dp.parallel.scatter import Shards
from lightning_dp.parallel.torch_private import copy_to_each, is_in_backward

if TYPE_CHECKING:
    from lightning_dp.parallel.processes import World

Buffers: TypeAlias = Literal["first", "mean"]
BUFFERS: tuple[Buffers, ...] = ("first", "mean")

_FORM = attrgetter("shape", "dtype", "device")


class Reducer:
    """Brings gradients and buffers to the root, and remembers which of both are still missing.

    Args:
        replicas: the root and its replicas.
        devices: theirs.
        buffers: whose buffers the root gets, see `reduce_buffers`.
        world: the processes, whose gradients and buffers are added; None if this is the only one.

    Attributes:
        backward: the one that runs, or has failed.
        rank_samples: of the step whose buffers the ranks have to exchange.
    """

    overlaps = True  # gradients leave accelerators while the backward runs

    def __init__(
        self,
        replicas: Replicas,
        devices: Sequence[torch.device],
        buffers: Buffers,
        world: World | None = None,
    ) -> None:
        self._replicas, self._devices = replicas, devices
        self._policy, self._world = buffers, world
        self._forward: Shards | None = None  # of a step whose buffers are still the replicas'
        self.backward: Backward | None = None
        self.rank_samples: Sequence[int] | None = None

    def close(self) -> None:
        """Ends what is open, in this process alone: after an error the others do not come."""
        self._world = self.rank_samples = None
        self.settle()

    def root_keeps_its_buffers(self, shards: Shards) -> bool:
        """Whether the root's buffers stay: it is replica 0, the first one with samples."""
        return self._policy == "first" and bool(shards.sizes[0])

    def after_forward(self, shards: Shards) -> None:
        """Notes whose buffers the root gets, after the backward or before the next step.

        Without gradients no backward will come, and it gets them now. A backward that the step ran
        itself has left gradients on replicas, which the root gets now.
        """
        self._forward = shards
        rows = self._replicas.parameters
        if {*map(GRAD, chain.from_iterable(rows[1:]))} - {None}:
            reduce_gradients(rows, self._replicas.packing)
        if not torch.is_grad_enabled():
            self.take_buffers()

    def begin(self, joint: JointBackward, gradient: Tensor, *, can_fail: bool) -> None:
        """A backward begins; if it can fail for lack of memory, it can be undone."""
        overlapping: Sequence[int] = ()
        if can_fail and self.overlaps:
            overlapping = joint.shards.active if joint.crosses else [k for k, *_ in joint.parts]
        self.backward = Backward(
            self._replicas, gradient, overlapping, can_be_undone=can_fail, world=self._world
        )

    def commit(self) -> None:
        """The backward has ended: its gradients, and the step's buffers, reach the root."""
        self.take_buffers()
        if self.backward is not None:
            self.backward.commit()
            self.backward = None
        if self.rank_samples is not None:
            self._exchange_buffers()

    def undo(self) -> None:
        """Takes back what a step has left that is to be run again."""
        self._forward = None
        if self.backward is not None:
            self.backward.discard()
            self.backward = None

    def settle(self) -> None:
        """Ends a step whose backward did not run or has failed."""
        if self.backward is not None:
            if is_in_backward():  # a checkpoint calls the module again
                return
            wait_for_autograd(self._devices)
            self.backward.discard()
            self.backward = None
        if self._forward is not None:
            self.take_buffers()
        if self.rank_samples is not None:
            self._exchange_buffers()

    def take_buffers(self) -> None:
        """Gives the root the buffers of a step, if it has not got them.

        Not before the backward, which checks that nothing it has saved was written to.
        """
        shards, self._forward = self._forward, None
        if shards is None:
            return
        if self._replicas.max_norm_embeddings:
            self._replicas.copy_back_renormalized_rows(shards.active)
        if not self.root_keeps_its_buffers(shards):
            buffers = self._replicas.buffers_of_steps
            worked = [buffers[k] for k in shards.active]
            reduce_buffers(buffers[0], worked, shards.active_sizes, self._policy)

    def _exchange_buffers(self) -> None:
        """Gives all ranks the same buffers: those of the first with samples, or the mean."""
        samples, self.rank_samples = self.rank_samples, None
        if samples is None or self._world is None:
            return
        root = self._replicas.buffers_of_steps[0]
        if self._policy == "mean":
            pairs = zip(self._world.all_gather_objects(root, "its buffers"), samples, strict=True)
            ranks = [(buffers, n) for buffers, n in pairs if n]
        else:
            first = next(rank for rank, n in enumerate(samples) if n)
            ranks = [(self._world.broadcast(root, first), 1)]
        reduce_buffers(root, [row for row, _ in ranks], [n for _, n in ranks], self._policy)


# Buffers


@torch.no_grad()
def reduce_buffers(
    root: Sequence[Tensor | None],
    replicas: Sequence[Sequence[Tensor | None]],
    sizes: Sequence[int],
    policy: Buffers,
) -> None:
    """Gives the root the buffers that a training step left on the replicas that worked.

    By policy those of the first of these, or the mean of all, weighted by their samples (what has
    no mean, such as integers or tensors of several shapes, keeps those of the first). Version
    counters stay, so that graphs stay usable. A root buffer of another shape or dtype is replaced.
    """
    weights = [n / sum(sizes) for n in sizes]
    for i, target in enumerate(root):
        values = [value for replica in replicas if (value := replica[i]) is not None]
        if target is None or not values:
            continue
        value = values[0].to(target.device)
        are_alike = all(other.shape == value.shape for other in values)
        if policy == "mean" and value.is_floating_point() and are_alike:
            value = _mean(torch.stack([v.to(target.device) for v in values]), weights)
        write_without_trace(target, value)


def _mean(values: Tensor, weights: Sequence[float]) -> Tensor:
    """The mean along dim 0; where all are equal, their value: constants collect no rounding."""
    terms = [value * weight for value, weight in zip(values, weights, strict=True)]
    return torch.where(values.eq(values[0]).all(0), values[0], torch.stack(terms).sum(0))


class BufferSnapshot:
    """The values of buffers at one moment. Its memory is kept, and copied to in few kernels."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        self._values: list[Tensor] = []
        self._forms: list[Any] = []

    @torch.no_grad()
    def take(self, buffers: Sequence[Tensor | None]) -> None:
        """Copies the buffers."""
        self._buffers = [buffer for buffer in buffers if buffer is not None]
        forms = list(map(_FORM, self._buffers))
        if self._buffers and forms == self._forms and all(map(can_be_packed, self._buffers)):
            copy_to_each(self._values, self._buffers)
        else:
            self._forms, self._values = forms, [buffer.clone() for buffer in self._buffers]

    @torch.no_grad()
    def restore(self) -> None:
        """Gives the buffers their values back; version counters stay, as batch norm leaves them."""
        for buffer, value in zip(self._buffers, self._values, strict=True):
            write_without_trace(buffer, value)


def write_without_trace(buffer: Tensor, value: Tensor) -> None:
    """Gives a buffer a value, if need be with its shape and dtype, so that no version counts it."""
    if buffer is value:
        return
    is_expanded = buffer.layout is torch.strided and 0 in buffer.stride()  # cannot be written to
    if _FORM(buffer) == _FORM(value) and not is_expanded:
        buffer.data.copy_(value)
    else:
        buffer.data = value.clone()
