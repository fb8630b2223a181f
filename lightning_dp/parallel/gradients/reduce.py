"""Reduce: what the replicas' backward and forward left on them becomes the root's.

Gradients are summed, not averaged: the losses' weights are already in them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, compress, count, repeat
from operator import attrgetter, is_, is_not
from typing import Literal, TypeAlias, cast

import torch
from torch import Tensor

from lightning_dp.parallel.batch import Shards
from lightning_dp.parallel.gradients.aside import GradientsAside, HooksOff, write_without_trace
from lightning_dp.parallel.gradients.at_once import wait_for_autograd
from lightning_dp.parallel.gradients.loss import JointBackward
from lightning_dp.parallel.gradients.overlap import Overlap
from lightning_dp.parallel.gradients.slices import Spread, add_in_slices, are_large
from lightning_dp.parallel.links import Packing, can_be_packed, gradients_on
from lightning_dp.parallel.replicas import Replicas
from lightning_dp.parallel.torch_private import add_to_each, hooked

Buffers: TypeAlias = Literal["first", "mean"]
BUFFERS: tuple[Buffers, ...] = ("first", "mean")
_GRAD = attrgetter("grad")
_IS_NONE = partial(is_, None)


class Reducer:
    """Brings gradients and buffers from the replicas to the root, at the right time.

    Hooks of the root's parameters are off during a backward: autograd would call them with the
    root's own share of the gradient. They are called with the sums; so parameters with hooks are
    reduced in every backward, also while gradients accumulate.
    """

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
        self._in_backward = False  # or one has not ended
        self._devices = devices
        self._overlap = None if stays is None else Overlap(stays)

    def after_forward(self, shards: Shards) -> None:
        """Notes what is to be settled, after the backward or before the next step.

        That is whose buffers the root keeps, and whose rows of embeddings were shortened. Without
        gradients no backward will come: they are settled now.
        """
        self._forwarded = shards.active
        if not self.root_keeps_its_buffers(shards):
            self._unsettled = shards
        if not torch.is_grad_enabled():
            self._settle_forward()

    def before_backward(self, joint: JointBackward, *, can_fail: bool = False) -> None:
        """Takes hooks of the root's parameters off, and the gradients that are to stay apart.

        They are where the backward may run out of memory, to be undone and done again. From now on
        buckets may leave.
        """
        self._in_backward = True
        with_hooks = hooked(self._replicas.root_parameters)
        if with_hooks or can_fail:
            self._take_aside(with_hooks, can_fail)
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
        self._in_backward = False
        if self._overlap is not None:
            self._overlap.end()
        self._settle_forward()
        self._call_hooks()
        earlier, self._earlier = self._earlier, None
        # By themselves first: apart from the earlier ones, they can still be undone.
        self._reduce(spread)
        if self._overlap is not None:
            self._overlap.arrive()
        if earlier is not None:
            earlier.add()
            if earlier.has_any and self._left_on_replicas():
                self._reduce(spread)

    def reduce_waiting(self) -> None:
        """Reduces what has accumulated on the replicas, if no backward has come to do so."""
        if self._waiting:
            self._waiting = False
            reduce_gradients(self._replicas.parameters, self._replicas.packing)

    def settle(self) -> None:
        """Does what a step left open whose backward did not come or did not end."""
        if self._in_backward:
            self._in_backward = False
            wait_for_autograd(self._devices)
        self._settle_forward()
        is_open = self._overlap is not None and self._overlap.is_open
        if self._hooked or self._earlier is not None or is_open:
            self._put_back()

    def undo(self) -> None:
        """Takes back what a step has left that is to be run again."""
        self._unsettled, self._forwarded = None, ()
        self._put_back()

    def root_keeps_its_buffers(self, shards: Shards) -> bool:
        """Whether replica 0's buffers stay: they are the root's, since it is the module itself."""
        return self._buffers == "first" and shards.active[0] == 0

    def _reduce(self, spread: Spread | None) -> None:
        self._waiting = self.accumulating
        if not self.accumulating:
            reduce_gradients(self._replicas.parameters, self._replicas.packing, spread)

    def _left_on_replicas(self) -> bool:
        """Whether earlier backwards, which accumulated, have left gradients on replicas."""
        others = chain.from_iterable(self._replicas.parameters[1:])
        return not self.accumulating and any([p.grad is not None for p in others])

    def _call_hooks(self) -> None:
        hooked = self._hooked
        if not hooked:
            return
        reduce_gradients(list(zip(*(parameters for parameters, _, _ in hooked), strict=True)))
        for _, hooks, _ in hooked:
            hooks.put_back()
        self._hooked = []
        for _, hooks, earlier in hooked:
            hooks.call(earlier)

    def _put_back(self) -> None:
        if self._overlap is not None:
            self._overlap.cancel()
        if self._earlier is not None:
            self._earlier.put_back()
            self._earlier = None
        for parameters, hooks, earlier in self._hooked:
            hooks.put_back()
            parameters[0].grad = earlier
        self._hooked = []

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


def reduce_gradients(
    parameters: Sequence[Sequence[Tensor]],
    packing: Packing | None = None,
    spread: Spread | None = None,
) -> None:
    """Adds the replicas' gradients to the root's and clears theirs.

    A parameter without a gradient on any replica keeps None.

    Of the kinds that `packing` is for, they travel in buckets where these are complete. Where
    nothing has to travel, the workers add them up, if there is a way to `spread` calls.
    """
    root, others = parameters[0], parameters[1:]
    if not root or not others:
        return
    device = root[0].device
    sums = list(map(_GRAD, root))
    terms = [list(map(_GRAD, replica)) for replica in others]
    is_elsewhere = any([replica[0].device != device for replica in others])
    if is_elsewhere or not (spread and are_large(root) and add_in_slices(sums, terms, spread)):
        done = packing.sums.add(sums, terms) if packing and is_elsewhere else set()
        if len(done) < len(root):
            _add_rest(root, sums, terms, done)
    for parameter in chain.from_iterable(others):
        parameter.grad = None


def _add_rest(
    root: Sequence[Tensor],
    sums: list[Tensor | None],
    terms: Sequence[list[Tensor | None]],
    done: set[int],
) -> None:
    """Adds those gradients that did not travel in buckets."""
    before = list(sums)
    for gradients in terms:
        for i in done:
            gradients[i] = None
        if any(map(is_not, gradients, repeat(None))):
            _add(sums, gradients_on(root[0].device, gradients))
    for parameter, total, old in zip(root, sums, before, strict=True):
        if total is not old and total is not None:
            parameter.grad = as_accumulated(total, parameter)


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
        values = [value.to(target.device) for value in values]
        value = values[0]
        are_alike = all(other.shape == value.shape for other in values)
        if policy == "mean" and value.is_floating_point() and are_alike:
            value = _mean(torch.stack(values), weights)
        write_without_trace(target, value)


def _mean(values: Tensor, weights: Sequence[float]) -> Tensor:
    """The mean along dim 0; where all are equal, their value: constants collect no rounding."""
    terms = [value * weight for value, weight in zip(values, weights, strict=True)]
    return torch.where(values.eq(values[0]).all(0), values[0], torch.stack(terms).sum(0))


def as_accumulated(gradient: Tensor, parameter: Tensor) -> Tensor:
    """A gradient with the strides that autograd gives it; fused optimizers rely on them.

    They are the parameter's, where its memory is dense; else those of contiguous rows.
    """
    are_plain = can_be_packed(parameter) and can_be_packed(gradient)
    if not are_plain or gradient.stride() == parameter.stride():
        return gradient
    like = torch.empty_like(parameter, dtype=gradient.dtype)
    if like.stride() != parameter.stride():
        return gradient.contiguous()
    return like.copy_(gradient)


def _add(sums: list[Tensor | None], gradients: list[Tensor | None]) -> None:
    """Adds gradients to sums, in place; where there is no sum yet, the gradient becomes it."""
    targets, terms = sums, gradients
    # Nearly always all are there, and this look is much shorter than the loop.
    if any(map(_IS_NONE, chain(sums, gradients))):
        targets, terms = [], []
        for i, (total, gradient) in enumerate(zip(sums, gradients, strict=True)):
            if total is None:
                sums[i] = gradient
            elif gradient is not None:
                targets.append(total)
                terms.append(gradient)
    if targets:
        add_to_each(cast(list[Tensor], targets), cast(list[Tensor], terms))
