"""Buffers: which of those that a training step left on the replicas the root gets."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from lightning_dp.parallel.torch_private import copy_to_each

Buffers: TypeAlias = Literal["first", "mean"]
BUFFERS: tuple[Buffers, ...] = ("first", "mean")

_FORM = attrgetter("shape", "dtype", "device")


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
        _write_without_trace(target, value)


def _mean(values: Tensor, weights: Sequence[float]) -> Tensor:
    """The mean along dim 0; where all are equal, their value: constants collect no rounding."""
    terms = [value * weight for value, weight in zip(values, weights, strict=True)]
    return torch.where(values.eq(values[0]).all(0), values[0], torch.stack(terms).sum(0))


class BufferSnapshot:
    """The values of buffers at the moment when it is made, copied in few kernels."""

    @torch.no_grad()
    def __init__(self, buffers: Sequence[Tensor | None]) -> None:
        self._buffers = [buffer for buffer in buffers if buffer is not None]
        self._values = list(map(torch.empty_like, self._buffers))
        if self._buffers:
            copy_to_each(self._values, self._buffers)

    @torch.no_grad()
    def restore(self) -> None:
        """Gives the buffers their values back; version counters stay, as batch norm leaves them."""
        for buffer, value in zip(self._buffers, self._values, strict=True):
            _write_without_trace(buffer, value)


def _write_without_trace(buffer: Tensor, value: Tensor) -> None:
    """Gives a buffer a value, if need be with its shape and dtype, so that no version counts it."""
    if buffer is value:
        return
    is_expanded = buffer.layout is torch.strided and 0 in buffer.stride()  # cannot be written to
    if _FORM(buffer) == _FORM(value) and not is_expanded:
        buffer.data.copy_(value)
    else:
        buffer.data = value.clone()
