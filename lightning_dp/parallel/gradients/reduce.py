"""Reduce: what the replicas' backward and forward left on them becomes the root's.

Gradients are summed, not averaged: the losses' weights are already in them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, compress, count, repeat
from operator import attrgetter, is_not
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_dp.parallel.batch import Shards
from lightning_dp.parallel.gradients.aside import GradientsAside, HooksOff, clear_gradients
from lightning_dp.parallel.gradients.at_once import wait_for_autograd
from lightning_dp.parallel.gradients.buffers import Buffers, reduce_buffers
from lightning_dp.parallel.gradients.loss import JointBackward
from lightning_dp.parallel.gradients.outside import Outside
from lightning_dp.parallel.gradients.overlap import Overlap
from lightning_dp.parallel.gradients.slices import Spread, reduce_gradients
from lightning_dp.parallel.replicas import Replicas
from lightning_dp.parallel.torch_private import accumulation_hooks, gradient_hooks, hooked

if TYPE_CHECKING:
    from lightning_dp.parallel.gradients.between import Between
    from lightning_dp.parallel.gradients.buffers_between import BuffersBetween
    from lightning_dp.parallel.processes import World

_GRAD = attrgetter("grad")


class Reducer:
    """Brings gradients and buffers from the replicas to the root, at the right time.

    Hooks of the root's parameters are off during a backward: autograd would call them with the
    root's own share of the gradient. They are called with the sums; so parameters with hooks are
    reduced in every backward, also while gradients accumulate.
    """

    between: Between | None = None  # the processes, if there are several
    buffers_between: BuffersBetween | None = None
    before_last: Callable[[], None] | None = None
    """Called before the last replica's backward: what it fills is complete, and may leave."""

    def __init__(
        self,
        replicas: Replicas,
        buffers: Buffers,
        devices: Sequence[torch.device],
        stays: Callable[[], bool] | None = None,
    ) -> None:
        self.accumulating = False  # a backward leaves gradients on replicas, for a later one
        self._replicas = replicas
        self._buffers: Buffers = buffers
        self._unsettled: Shards | None = None
        self._forwarded: Sequence[int] = ()
        self._hooked: list[tuple[list[Tensor], HooksOff, Tensor | None]] = []
        self._earlier: GradientsAside | None = None
        self._waiting = False
        self._outside = Outside()
        self._in_backward = False  # or one has not ended
        self._is_told = False  # of that by an error, the caller
        self._devices = devices
        self._overlap = None if stays is None else Overlap(stays)

    def join(self, world: World) -> None:
        """Gradients are those of all processes from now on."""
        from lightning_dp.parallel.gradients.between import Between
        from lightning_dp.parallel.gradients.buffers_between import BuffersBetween

        self.between = Between(world)
        self.buffers_between = BuffersBetween(self._replicas, world, self._buffers)

    def close(self) -> None:
        """Settles what is open here alone: after an error other processes do not come."""
        if self.between is not None:
            self.between.cancel()
        self.between = self.buffers_between = None
        self.settle()

    def resync(self) -> None:
        """Leaves nothing open, in all processes: what steps did to their buffers becomes alike."""
        self.settle()
        self.collect_waiting()
        if self.buffers_between is not None:
            self.buffers_between.share()

    def after_forward(self, shards: Shards) -> None:
        """Notes what is to be settled, after the backward or before the next step.

        That is whose buffers the root keeps, and whose rows of embeddings were shortened. Without
        gradients no backward will come: they are settled now.
        """
        self._forwarded = shards.active
        if not self.root_keeps_its_buffers(shards):
            self._unsettled = shards
        if self.buffers_between is not None:
            self.buffers_between.after_forward(sum(shards.sizes))
        # What a step does to gradients, it does to those of every replica: its own backward, too.
        rows = self._replicas.parameters
        if not {None}.issuperset(map(_GRAD, chain.from_iterable(rows[1:]))):
            self._waiting = True
            self._outside.note(rows)
        if not torch.is_grad_enabled():
            self._settle_forward()

    def before_backward(self, joint: JointBackward, *, can_fail: bool = False) -> None:
        """Takes hooks of the root's parameters off, and the gradients that are to stay apart.

        They are where the backward may run out of memory, to be undone and done again. From now on
        buckets may leave.
        """
        self._in_backward = True
        if self._waiting:
            self._outside.follow(self._replicas.parameters)
        root = self._replicas.root_parameters
        has_any = any(map(gradient_hooks, root)) or any(map(accumulation_hooks, root))
        with_hooks = hooked(root) if has_any else []
        if self.between is not None:
            self._begin_between(self.between, with_hooks)
        if with_hooks or can_fail:
            self._take_aside(with_hooks, can_fail)
        self.before_last = None
        # Else processes have more to tell each other, each in the midst of other buckets.
        is_alone = not joint.crosses and not with_hooks and not can_fail
        if self.between is not None and is_alone and len(self._replicas.parameters) == 1:
            self.before_last = self.between.leave_early  # all replicas fill the root's gradients
        if self._overlap is not None and not self.accumulating:
            self._begin_overlap(self._overlap, joint, with_hooks)

    def _take_aside(self, with_hooks: Sequence[int], can_fail: bool) -> None:
        parameters = self._replicas.parameters
        for i in with_hooks:
            own, root = [replica[i] for replica in parameters], parameters[0][i]
            hooks = HooksOff(root)
            self._hooked.append((own, hooks, root.grad))
            hooks.take()
            root.grad = None
        if can_fail:
            self._earlier = GradientsAside(chain.from_iterable(parameters))

    def _begin_between(self, between: Between, with_hooks: Sequence[int]) -> None:
        root = self._replicas.root_parameters
        waiting = between.own_among([root[i] for i in with_hooks])
        if waiting:  # these have hooks since the latest backward, which accumulated
            reduce_gradients(self._replicas.parameters, self._replicas.packing)
            between.sum_(waiting)
        between.begin(root, with_hooks, stay=self.accumulating)

    def _begin_overlap(
        self, overlap: Overlap, joint: JointBackward, with_hooks: Sequence[int]
    ) -> None:
        """Not of what the root has gradients of: they stay as they are until the backward ends."""
        rows = {id(row): row for row in map(self._replicas.parameters_of, joint.fills)}
        if len(rows) > 1 and joint.fills[0] == 0:
            root = self._replicas.root_parameters
            kept = compress(count(), map(is_not, map(_GRAD, root), repeat(None)))
            overlap.begin([*rows.values()], self._replicas.packing, {*with_hooks, *kept})

    def after_backward(self, spread: Spread | None = None) -> None:
        """Reduces the gradients, unless they accumulate; see `reduce_gradients`."""
        if self._overlap is not None:
            self._overlap.end()
        self._settle_forward()
        self._call_hooks()
        # By themselves first: apart from the earlier ones, they can still be undone.
        self._reduce(spread)
        if self._overlap is not None:
            self._overlap.arrive()
        earlier, self._earlier = self._earlier, None
        if earlier is not None:
            earlier.add()
            if earlier.has_any and self._left_on_replicas():
                self._reduce(spread)
        if self.between is not None and not self.accumulating:
            self.between.finish()
        if self.buffers_between is not None:
            self.buffers_between.after_step()
        if self._waiting:
            self._outside.note(self._replicas.parameters)
        self._in_backward = False

    def fail(self) -> None:
        """A backward has failed: what the caller does to the root's gradients from now on counts.

        Nothing is waited for: this may be one of autograd's threads.
        """
        self._is_told = True
        self._put_roots_back()

    def reduce_waiting(self) -> None:
        """Reduces what has accumulated, if no backward has come to do so."""
        self.collect_waiting()
        if self.between is not None:
            self.between.sum_waiting()

    def collect_waiting(self) -> None:
        """Brings what has accumulated on the replicas to the root; processes keep their own."""
        if self._waiting:
            self._waiting = False
            self._outside.follow(self._replicas.parameters)
            reduce_gradients(self._replicas.parameters, self._replicas.packing)

    def settle(self, *, trains: bool = False) -> None:
        """Does what a step left open whose backward did not come or did not end.

        If a training step comes next, it may read buffers that another process's step has written.
        """
        if self._in_backward:
            self._in_backward = False
            wait_for_autograd(self._devices)
            if self.between is not None:
                self.between.cancel()
            if not self._waiting:  # else they follow the root's, see `Outside`
                # Parts of sums that were not made would be added to the next ones.
                clear_gradients(chain.from_iterable(self._replicas.parameters[1:]))
        self._settle_forward()
        if self.buffers_between is not None:
            self.buffers_between.after_step()
        is_open = self._overlap is not None and self._overlap.is_open
        if self._hooked or self._earlier is not None or is_open:
            self._put_back()
        self._is_told = False
        if trains and self._waiting:
            self._outside.follow(self._replicas.parameters)
        if trains and self.buffers_between is not None:
            self.buffers_between.before_step()

    def undo(self) -> None:
        """Takes back what a step has left that is to be run again."""
        self._unsettled, self._forwarded = None, ()
        self._is_told = False  # they were not the caller's meanwhile
        self._put_back()

    def root_keeps_its_buffers(self, shards: Shards) -> bool:
        """Whether replica 0's buffers stay: they are the root's, since it is the module itself."""
        return self._buffers == "first" and shards.active[0] == 0

    def _reduce(self, spread: Spread | None) -> None:
        self._waiting = self.accumulating
        parameters = self._replicas.parameters
        if len(parameters) > 1 and (not self.accumulating or self._outside.has_written):
            reduce_gradients(parameters, self._replicas.packing, spread)

    def _left_on_replicas(self) -> bool:
        """Whether earlier backwards, which accumulated, have left gradients on replicas."""
        others = chain.from_iterable(self._replicas.parameters[1:])
        return not self.accumulating and any([p.grad is not None for p in others])

    def _call_hooks(self) -> None:
        hooked = self._hooked
        if not hooked:
            return
        reduce_gradients(list(zip(*(parameters for parameters, _, _ in hooked), strict=True)))
        if self.between is not None:
            self.between.sum_([parameters[0] for parameters, _, _ in hooked])
        for _, hooks, _ in hooked:
            hooks.put_back()
        self._hooked = []
        for _, hooks, earlier in hooked:
            hooks.call(earlier)

    def _put_back(self) -> None:
        if self._overlap is not None:
            self._overlap.cancel()
        if self.between is not None:
            self.between.cancel()
        if not self._is_told:
            self._put_roots_back()
        if self._earlier is not None:
            self._earlier.put_back(slice(len(self._replicas.root_parameters), None))
            self._earlier = None
        for _, hooks, _ in self._hooked:
            hooks.put_back()
        self._hooked = []

    def _put_roots_back(self) -> None:
        if self._earlier is not None:
            self._earlier.put_back(slice(len(self._replicas.root_parameters)))
        for parameters, _, earlier in self._hooked:
            parameters[0].grad = earlier

    def _settle_forward(self) -> None:
        """Not before the backward, which checks that nobody wrote to what it saved."""
        if not self._forwarded:
            return
        forwarded, self._forwarded = self._forwarded, ()
        self._replicas.adopt_rows(forwarded)
        shards, self._unsettled = self._unsettled, None
        if shards is not None:
            buffers = self._replicas.buffers_of_steps
            worked = [buffers[k] for k in shards.active]
            reduce_buffers(buffers[0], worked, shards.active_sizes, self._buffers)
