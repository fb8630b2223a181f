"""Reducer: brings gradients and buffers from the replicas to the root, at the right time.

Gradients are summed, not averaged: the losses' weights are already in them. With several processes
the ranks' sum follows the local one, at the end of `Backward.commit`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor

from lightning_dp.parallel.comm import can_be_packed
from lightning_dp.parallel.reduce.backward import Backward, ParallelFor, reduce_gradients
from lightning_dp.parallel.reduce.loss import JointBackward, wait_for_autograd
from lightning_dp.parallel.replicate import Replicas
from lightning_dp.parallel.scatter import Shards
from lightning_dp.parallel.torch_private import copy_to_each

if TYPE_CHECKING:
    from lightning_dp.parallel.processes import RankBuffers, RankReducer, World

Buffers: TypeAlias = Literal["first", "mean"]
BUFFERS: tuple[Buffers, ...] = ("first", "mean")

_GRAD = attrgetter("grad")
_FORM = attrgetter("shape", "dtype", "device")


class Reducer:
    """What a step leaves open between its forward, its backward and the next step.

    Args:
        replicas: the root and its replicas.
        buffers: whose buffers the root gets, see `reduce_buffers`.
        devices: the replicas' devices.
        is_timed: whether buckets wait until the backward ends, as when devices are timed; None if
            they always do.
        world: the processes, whose gradients and buffers are added; None if this is the only one.
    """

    ranks: RankReducer | None = None  # the gradients of all ranks, if there are several processes
    rank_buffers: RankBuffers | None = None  # and their buffers

    def __init__(
        self,
        replicas: Replicas,
        buffers: Buffers,
        devices: Sequence[torch.device],
        is_timed: Callable[[], bool] | None = None,
        world: World | None = None,
    ) -> None:
        self.accumulating = False  # backwards leave the sum over the ranks to a later one
        self._replicas, self._policy, self._devices = replicas, buffers, devices
        self._is_timed = is_timed
        self._forward: Shards | None = None  # of a step whose buffers are still the replicas'
        self._backward: Backward | None = None  # which runs, or has failed
        if world is not None:
            from lightning_dp.parallel.processes import RankBuffers, RankReducer

            def write(ranks: list[list[Tensor | None]], samples: list[int]) -> None:
                reduce_buffers(replicas.buffers_of_steps[0], ranks, samples, buffers)

            self.ranks = RankReducer(world)
            self.rank_buffers = RankBuffers(
                lambda: replicas.buffers_of_steps[0], write, world, is_mean=buffers == "mean"
            )

    def close(self) -> None:
        """Ends what is open, in this process alone: after an error the others do not come."""
        if self.ranks is not None:
            self.ranks.cancel()
        self.ranks = self.rank_buffers = None
        self.settle()
        self._replicas.packing.sums.pools.clear()

    def root_keeps_its_buffers(self, shards: Shards) -> bool:
        """Whether the root's buffers stay: it is replica 0, the first one with samples."""
        return self._policy == "first" and bool(shards.sizes[0])

    # The forward

    def after_forward(self, shards: Shards) -> None:
        """Notes whose buffers the root gets, after the backward or before the next step.

        Without gradients no backward will come, and it gets them now. A backward that the step ran
        itself has left gradients on replicas, which the root gets now.
        """
        self._forward = shards
        rows = self._replicas.parameters
        if {*map(_GRAD, chain.from_iterable(rows[1:]))} - {None}:
            reduce_gradients(rows, self._replicas.packing)
        if not torch.is_grad_enabled():
            self._take_buffers(shards)

    def _take_buffers(self, shards: Shards) -> None:
        """Not before the backward, which checks that nothing it has saved was written to."""
        self._forward = None
        if self._replicas.limited:
            self._replicas.adopt_rows(shards.active)
        if self._policy == "mean" or not shards.sizes[0]:
            buffers = self._replicas.buffers_of_steps
            worked = [buffers[k] for k in shards.active]
            reduce_buffers(buffers[0], worked, shards.active_sizes, self._policy)

    # The backward

    def before_backward(self, joint: JointBackward, *, can_fail: bool = False) -> None:
        """A backward begins; if it can fail for lack of memory, it can be undone."""
        fills = None
        if can_fail and self._is_timed is not None and not self._is_timed():
            fills = joint.shards.active if joint.crosses else [g.replica for g in joint.graphs]
        self._backward = Backward(
            self._replicas,
            fills,
            accumulates=self.accumulating,
            can_be_undone=can_fail,
            ranks=self.ranks,
        )

    def after_backward(self, parallel_for: ParallelFor | None = None) -> None:
        """The backward has ended: its gradients, and the step's buffers, reach the root."""
        if self._forward is not None:
            self._take_buffers(self._forward)
        if self._backward is not None:
            self._backward.commit(parallel_for)
        if self.rank_buffers is not None:
            self.rank_buffers.after_step()
        self._backward = None

    def fail(self) -> None:
        """The backward has failed: the root's gradients are the earlier ones."""
        if self._backward is not None:
            self._backward.abort()

    def undo(self) -> None:
        """Takes back what a step has left that is to be run again."""
        self._forward = None
        if self._backward is not None:
            self._backward.discard()
            self._backward = None

    def settle(self, *, trains: bool = False) -> None:
        """Ends a step whose backward did not run or has failed.

        Args:
            trains: whether a training step follows, which may read buffers of other ranks' steps.
        """
        if self._backward is not None:
            wait_for_autograd(self._devices)
            self._backward.discard()
            self._backward = None
        if self._forward is not None:
            self._take_buffers(self._forward)
        if self.rank_buffers is not None:
            self.rank_buffers.after_step()
            if trains:
                self.rank_buffers.before_step()

    def sum_waiting(self) -> None:
        """Sums over the ranks what has accumulated, if no backward has come to do so."""
        if self.ranks is not None:
            self.ranks.sum_waiting()


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
    no mean, such as integers or tensors of several shapes, keeps those of the first). They are
    written without a trace, as batch norm writes to its own: graphs that have saved them stay
    usable. A root's of another shape or dtype takes theirs.
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


class Snapshot:
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

    def drop(self) -> None:
        """Restores nothing from here on."""
        self._buffers = []

    @torch.no_grad()
    def restore(self) -> None:
        """Gives the buffers their values back, without a trace, as batch norm writes to its own."""
        for buffer, value in zip(self._buffers, self._values, strict=False):
            if _FORM(buffer) != _FORM(value) or not torch.equal(buffer, value):
                write_without_trace(buffer, value)


def write_without_trace(buffer: Tensor, value: Tensor) -> None:
    """Gives a buffer a value, if need be with its shape and dtype, so that no version counts it."""
    if buffer is value:
        return
    are_alike = _FORM(buffer) == _FORM(value)
    is_expanded = buffer.layout is torch.strided and 0 in buffer.stride()
    if are_alike and not is_expanded:
        buffer.data.copy_(value)
    elif not are_alike or not torch.equal(buffer, value):
        buffer.data = value.clone()
