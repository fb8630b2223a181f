"""Reduce: what the replicas' backward and forward left on them becomes the root's.

Gradients are summed, not averaged: the losses' weights are already in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import Literal, TypeAlias, cast

import torch
from torch import Tensor, nn

from lightning_dp.parallel.links import gradients_on

Buffers: TypeAlias = Literal["first", "mean"]
BUFFERS: tuple[Buffers, ...] = ("first", "mean")
_GRAD = attrgetter("grad")


def reduce_gradients(parameters: Sequence[Sequence[nn.Parameter]]) -> None:
    """Adds the replicas' gradients to the root's and clears theirs.

    A parameter without a gradient on any replica keeps None.

    Args:
        parameters: the parameters of each replica, root first; equal positions correspond.
    """
    root, others = parameters[0], parameters[1:]
    if not root:
        return
    device = root[0].device
    sums = list(map(_GRAD, root))
    before = list(sums)
    for replica in others:
        gradients = list(map(_GRAD, replica))
        _add(sums, gradients_on(device, gradients))
        for parameter in replica:
            parameter.grad = None
    for parameter, total, old in zip(root, sums, before, strict=True):
        if total is not old:
            parameter.grad = total


class EarlierGradients:
    """The gradients of earlier backwards, kept apart while another one runs.

    If that one does not end, its half-done work can be taken away from theirs.

    Args:
        parameters: the parameters of each replica; their gradients are None from now on.

    Attributes:
        any_on_replicas: whether any replica but the root had gradients.
    """

    def __init__(self, parameters: Sequence[Sequence[nn.Parameter]]) -> None:
        self._parameters = list(chain.from_iterable(parameters))
        self.any_on_replicas = any(p.grad is not None for p in chain.from_iterable(parameters[1:]))
        self._kept = [(p, p.grad) for p in self._parameters if p.grad is not None]
        for parameter, _ in self._kept:
            parameter.grad = None

    def add(self) -> None:
        """Adds the new gradients to the earlier ones, in place, as accumulation does."""
        pairs = [(p, earlier, p.grad) for p, earlier in self._kept]
        for parameter, earlier, _ in pairs:
            parameter.grad = earlier
        both = [(earlier, new) for _, earlier, new in pairs if new is not None]
        if both:
            torch._foreach_add_([earlier for earlier, _ in both], [new for _, new in both])

    def put_back(self) -> None:
        """Only the earlier gradients remain."""
        for parameter in self._parameters:
            parameter.grad = None
        for parameter, earlier in self._kept:
            parameter.grad = earlier


@torch.no_grad()
def reduce_buffers(
    root: Sequence[Tensor | None],
    replicas: Sequence[Sequence[Tensor | None]],
    sizes: Sequence[int],
    policy: Buffers,
) -> None:
    """Gives the root the buffers that a training step left on the replicas.

    They are written without a trace, as batch norm writes to its own: graphs that have saved them
    stay usable.

    Args:
        root: the root's buffers.
        replicas: the buffers of each replica that worked; equal positions correspond.
        sizes: samples of each replica that worked.
        policy: `"first"` for the values of the first replica that worked, `"mean"` for the mean
            of all, weighted by `sizes` (buffers of integers keep those of the first).
    """
    weights = [n / sum(sizes) for n in sizes]
    for i, target in enumerate(root):
        values = [value for replica in replicas if (value := replica[i]) is not None]
        if target is None or not values:
            continue
        values = [value.to(target.device) for value in values]
        if policy == "first" or _has_no_mean(values):
            target.data.copy_(values[0])
        else:
            terms = [value * weight for value, weight in zip(values, weights, strict=True)]
            target.data.copy_(torch.stack(terms).sum(0))


def _has_no_mean(values: list[Tensor]) -> bool:
    """Whether values are integers, or all equal: a constant must not collect rounding errors."""
    first = values[0]
    return not first.is_floating_point() or all(torch.equal(first, value) for value in values)


def _add(sums: list[Tensor | None], gradients: list[Tensor | None]) -> None:
    """Adds gradients to sums, in place; where there is no sum yet, the gradient becomes it."""
    targets, terms = sums, gradients
    # Nearly always all are there, and this look is much shorter than the loop.
    if any([x is None for x in chain(sums, gradients)]):
        targets, terms = [], []
        for i, (total, gradient) in enumerate(zip(sums, gradients, strict=True)):
            if total is None:
                sums[i] = gradient
            elif gradient is not None:
                targets.append(total)
                terms.append(gradient)
    if targets:
        torch._foreach_add_(cast(list[Tensor], targets), cast(list[Tensor], terms))
