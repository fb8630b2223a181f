"""Snapshots of buffers: what a step that did not fit has written is taken back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_dp.parallel.torch_private import copy_to_each


class Snapshot:
    """The values of buffers at one moment; taken again and again into the same memory."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        self._values: list[Tensor] = []

    @torch.no_grad()
    def take(self, buffers: Sequence[Tensor | None]) -> None:
        """Copies the buffers."""
        self._buffers = [buffer for buffer in buffers if buffer is not None]
        pairs = zip(self._buffers, self._values, strict=False)
        if len(self._buffers) != len(self._values) or not all(_are_alike(*pair) for pair in pairs):
            self._values = [buffer.clone() for buffer in self._buffers]
        elif self._values:
            copy_to_each(self._values, self._buffers)

    def drop(self) -> None:
        """There is nothing to restore any more; the memory is kept for the next one."""
        self._buffers = []

    @torch.no_grad()
    def restore(self) -> None:
        """Gives the buffers their values back, without a trace, as batch norm writes to its own."""
        for buffer, value in zip(self._buffers, self._values, strict=False):
            if not torch.equal(buffer, value):
                buffer.data.copy_(value)


def _are_alike(buffer: Tensor, value: Tensor) -> bool:
    return (buffer.shape, buffer.dtype, buffer.device) == (value.shape, value.dtype, value.device)
