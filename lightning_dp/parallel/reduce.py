"""Reduce: what the replicas' backward and forward left on them becomes the root's.

Gradients are summed, not averaged: the losses' weights are already in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from lightning_dp.parallel.transfer import to_device_coalesced

Buffers: TypeAlias = Literal["first", "mean"]
BUFFERS: tuple[Buffers, ...] = ("first", "mean")


def reduce_gradients(parameters: Sequence[Sequence[nn.Parameter]]) -> None:
    """Adds the replicas' gradients to the root's and clears theirs.

    A parameter without a gradient on any replica keeps None.

    Args:
        parameters: the parameters of each replica, root first; equal positions correspond.
    """
    root, others = parameters[0], parameters[1:]
    for replica in others:
        gradients = [parameter.grad for parameter in replica]
        used = [i for i, gradient in enumerate(gradients) if gradient is not None]
        for i in used:
            replica[i].grad = None
        _add([root[i] for i in used], [g for g in gradients if g is not None])


@torch.no_grad()
def reduce_buffers(
    root: Sequence[Tensor | None],
    replicas: Sequence[Sequence[Tensor | None]],
    sizes: Sequence[int],
    policy: Buffers,
) -> None:
    """Gives the root the buffers that a training step left on the replicas.

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
            target.copy_(values[0])
        else:
            terms = [value * weight for value, weight in zip(values, weights, strict=True)]
            target.copy_(torch.stack(terms).sum(0))


def _has_no_mean(values: list[Tensor]) -> bool:
    """Whether values are integers, or all equal: a constant must not collect rounding errors."""
    first = values[0]
    return not first.is_floating_point() or all(torch.equal(first, value) for value in values)


def _add(parameters: list[nn.Parameter], gradients: list[Tensor]) -> None:
    sums: list[Tensor] = []
    terms: list[Tensor] = []
    for parameter, gradient in zip(parameters, _moved(parameters, gradients), strict=True):
        if parameter.grad is None:
            parameter.grad = gradient
        elif gradient.is_sparse or parameter.grad.is_sparse:
            parameter.grad = parameter.grad + gradient
        else:
            sums.append(parameter.grad)
            terms.append(gradient)
    if sums:
        torch._foreach_add_(sums, terms)


def _moved(parameters: list[nn.Parameter], gradients: list[Tensor]) -> list[Tensor]:
    if not gradients or gradients[0].device == parameters[0].device:
        return gradients
    device = parameters[0].device
    dense = iter(to_device_coalesced([g for g in gradients if not g.is_sparse], device))
    return [g.to(device) if g.is_sparse else next(dense) for g in gradients]
