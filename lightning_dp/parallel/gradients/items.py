"""Items: what a loss is a mean over, where that is not samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from lightning_dp.parallel.links import joining_device


def items_of(loss: Tensor) -> float | Tensor | None:
    """What a loss is a mean over, if its attribute `num_items` tells: a number or a tensor."""
    items = getattr(loss, "num_items", None)
    return None if items is None else count_of(items)


def count_of(items: Any) -> float | Tensor:
    """How many items a step says there are: a number, or a tensor of one element."""
    if not isinstance(items, int | float) and not (
        isinstance(items, Tensor) and items.numel() == 1
    ):
        got = tuple(items.shape) if isinstance(items, Tensor) else type(items).__qualname__
        raise TypeError(
            f"Expected num_items to be a number or a tensor of one element, got {got}. Give the "
            "number of items that the loss is a mean over."
        )
    return items


def numbers_of(counts: Sequence[float | Tensor]) -> list[float]:
    """The values of counts on several devices, for which the host waits once."""
    tensors = [count.detach().reshape(()) for count in counts if isinstance(count, Tensor)]
    if not tensors:
        return cast(list[float], list(counts))
    device = joining_device(tensors, torch.device("cpu"))
    values = iter(torch.stack([tensor.to(device) for tensor in tensors]).tolist())
    return [next(values) if isinstance(count, Tensor) else count for count in counts]


def as_told(
    count: float | None, told: float | Tensor | None, device: torch.device
) -> float | Tensor | None:
    """The count of all replicas in the form in which a step has told its own."""
    if count is None or not isinstance(told, Tensor):
        return count
    return torch.full_like(told, count, device=device, requires_grad=False)


def sum_of_losses(tensors: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> Tensor:
    """Several losses whose backward runs at once are their sum, weighted by their gradients."""
    if any(items_of(tensor) is not None for tensor in tensors):
        raise ValueError(
            f"Expected one loss with num_items, got a backward of {len(tensors)} tensors, some "
            "with num_items. Make a backward of each: shards weigh differently in each of them."
        )
    pairs = zip(tensors, gradients, strict=True)
    return torch.stack([t.sum() if g is None else (t * g).sum() for t, g in pairs]).sum()
