"""Reducer: brings gradients and buffers from the replicas to the root, at the right time.

Gradients are summed, not averaged: the losses' weights are already in them. With several processes
the ranks' sum follows the local one, at the end of `Backward.commit`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_dp.parallel.reduce.backward import Backward
from lightning_dp.parallel.reduce.buffers import Buffers, reduce_buffers
from lightning_dp.parallel.reduce.gradients import Spread, clear_gradients, reduce_gradients
from lightning_dp.parallel.reduce.loss import JointBackward, wait_for_autograd
from lightning_dp.parallel.replicate import Replicas
from lightning_dp.parallel.scatter import Shards
from lightning_dp.parallel.torch_private import version

if TYPE_CHECKING:
    from lightning_dp.parallel.processes import RankBuffers, RankReducer, World

_GRAD: Callable[[Tensor], Tensor | None] = attrgetter("grad")


class Reducer:
    """What a step leaves open between its forward, its backward and the next step.

    Args:
        replicas: the root and its replicas.
        buffers: whose buffers the root gets, see `reduce_buffers`.
        devices: the replicas' devices.
        stays: whether buckets stay until the backward ends, as when devices are timed; or None.
    """

    between: RankReducer | None = None  # the ranks' gradients, if there are several processes
    buffers_between: RankBuffers | None = None  # and their buffers

    def __init__(
        self,
        replicas: Replicas,
        buffers: Buffers,
        devices: Sequence[torch.device],
        stays: Callable[[], bool] | None = None,
    ) -> None:
        self.accumulating = False  # backwards leave their gradients on the replicas
        self._replicas = replicas
        self._buffers: Buffers = buffers
        self._devices = devices
        self._stays = stays
        self._forward: Shards | None = None  # of a step whose buffers are still the replicas'
        self._backward: Backward | None = None  # which runs, or has failed
        self._waiting: list[tuple[Tensor, int] | None] | None = None
        """While replicas keep gradients: those of the root, with their versions."""

    def join(self, world: World) -> None:
        """Gradients and buffers are those of all processes from now on."""
        from lightning_dp.parallel.processes import RankBuffers, RankReducer

        replicas, policy = self._replicas, self._buffers

        def write(ranks: list[list[Tensor | None]], samples: list[int]) -> None:
            reduce_buffers(replicas.buffers_of_steps[0], ranks, samples, policy)

        self.between = RankReducer(world)
        self.buffers_between = RankBuffers(
            lambda: replicas.buffers_of_steps[0], write, world, is_mean=policy == "mean"
        )

    def close(self) -> None:
        """Ends what is open, in this process alone: after an error the others do not come."""
        if self.between is not None:
            self.between.cancel()
        self.between = self.buffers_between = None
        self.settle()
        self._replicas.packing.sums.pools.clear()

    def resync(self) -> None:
        """Ends what is open, and gives the root all gradients."""
        self.settle()
        self.collect_waiting()

    def root_keeps_its_buffers(self, shards: Shards) -> bool:
        """Whether the root's buffers stay: it is replica 0, the first one with samples."""
        return self._buffers == "first" and shards.active[0] == 0

    # The forward

    def after_forward(self, shards: Shards) -> None:
        """Notes whose buffers the root gets, after the backward or before the next step.

        Without gradients no backward will come, and it gets them now.
        """
        self._forward = shards
        others = chain.from_iterable(self._replicas.parameters[1:])
        if any(parameter.grad is not None for parameter in others):  # of a backward in the step
            self._note_waiting()
        if not torch.is_grad_enabled():
            self._settle_forward()

    def _settle_forward(self) -> None:
        """Not before the backward, which checks that nothing it has saved was written to."""
        shards, self._forward = self._forward, None
        if shards is None:
            return
        self._replicas.adopt_rows(shards.active)
        if not self.root_keeps_its_buffers(shards):
            buffers = self._replicas.buffers_of_steps
            worked = [buffers[k] for k in shards.active]
            reduce_buffers(buffers[0], worked, shards.active_sizes, self._buffers)

    # The backward

    def before_backward(self, joint: JointBackward, *, can_fail: bool = False) -> None:
        """A backward begins; if it can fail for lack of memory, it can be undone."""
        self._follow_root()
        may_leave = can_fail and 0 in joint.fills and self._stays is not None and not self._stays()
        self._backward = Backward(
            self._replicas,
            joint.fills if may_leave else None,
            accumulates=self.accumulating,
            can_be_undone=can_fail,
            ranks=self.between,
        )

    def after_backward(self, spread: Spread | None = None) -> None:
        """The backward has ended: its gradients, and the step's buffers, reach the root."""
        self._settle_forward()
        backward = self._backward
        if backward is not None:
            backward.commit(spread)
            if backward.accumulates:
                self._note_waiting()
            else:
                self._waiting = None
        if self.buffers_between is not None:
            self.buffers_between.after_step()
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
            if self._waiting is None:  # else they go with the root's, which has a part of them, too
                clear_gradients(chain.from_iterable(self._replicas.parameters[1:]))
            self._backward = None
        self._settle_forward()
        if self.buffers_between is not None:
            self.buffers_between.after_step()
        if trains:
            self._follow_root()
            if self.buffers_between is not None:
                self.buffers_between.before_step()

    # Gradients that wait on replicas, between micro-batches

    def reduce_waiting(self) -> None:
        """Sums what has accumulated, if no backward has come to do so."""
        self.collect_waiting()
        if self.between is not None:
            self.between.sum_waiting()

    def collect_waiting(self) -> None:
        """Brings what has accumulated on the replicas to the root; ranks keep their own."""
        self._follow_root()
        if self._waiting is not None:
            self._waiting = None
            reduce_gradients(self._replicas.parameters, self._replicas.packing)

    def _note_waiting(self) -> None:
        rows = self._replicas.parameters
        root = rows[0]
        # Where the root has no gradient, it would not be seen when they are cleared.
        lone = [
            i
            for i, parameter in enumerate(root)
            if parameter.grad is None and any(row[i].grad is not None for row in rows[1:])
        ]
        reduce_gradients([[row[i] for i in lone] for row in rows])
        self._waiting = [None if g is None else (g, version(g)) for g in map(_GRAD, root)]

    def _follow_root(self) -> None:
        """Where the root's gradients were cleared since, as by zero_grad(), clears the others."""
        rows = self._replicas.parameters
        for i, seen in enumerate(self._waiting or ()):
            now = rows[0][i].grad
            if seen is None or (now is seen[0] and version(now) == seen[1]):
                continue
            values = now.coalesce().values() if now is not None and now.is_sparse else now
            if values is None or not bool(values.any()):
                clear_gradients([row[i] for row in rows[1:]])
