"""Buffers: what the forwards of a training step have left on the replicas becomes the root's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from lightning_dp.parallel.gradients.aside import write_without_trace

Buffers: TypeAlias = Literal["first", "mean"]
BUFFERS: tuple[Buffers, ...] = ("first", "mean")


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
