"""Copies between devices: few large ones instead of many small ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_dp.parallel import tree

BUCKET_BYTES = 32 * 2**20
"""A bucket is sent once it holds this much; larger tensors travel alone."""


def to_device(node: Any, device: torch.device) -> Any:
    """Moves the tensors of a tree; those already on `device` stay the same objects."""

    def move(leaf: Any) -> Any:
        return leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf

    return tree.map_leaves(move, node)


def copy_coalesced(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copies each source into its target, in place; both lists lie on one device each.

    Between devices, tensors of one dtype are packed into buckets on the source's device, so that
    a model of hundreds of parameters crosses in a few copies.

    Args:
        sources: tensors on one device.
        targets: tensors of the same shapes and dtypes on one other or the same device.
    """
    if not sources:
        return
    if sources[0].device == targets[0].device:
        torch._foreach_copy_(list(targets), list(sources))
        return
    for positions in _buckets(sources):
        parts = to_device_coalesced([sources[i] for i in positions], targets[0].device)
        torch._foreach_copy_([targets[i] for i in positions], parts)


def to_device_coalesced(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The tensors on `device`; those of one dtype are views of one copy."""
    if not tensors or tensors[0].device == device:
        return list(tensors)
    moved: list[Tensor] = [tensors[0]] * len(tensors)
    for positions in _buckets(tensors):
        bucket = [tensors[i] for i in positions]
        packed = torch.cat([t.reshape(-1) for t in bucket]) if len(bucket) > 1 else bucket[0]
        arrived = packed.to(device, non_blocking=True)
        parts = torch.split(arrived.reshape(-1), [t.numel() for t in bucket])
        for i, part in zip(positions, parts, strict=True):
            moved[i] = part.view(tensors[i].shape)
    return moved


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """Positions of tensors that travel together: one dtype, at most a bucket's bytes."""
    open_buckets: dict[torch.dtype, tuple[list[int], int]] = {}
    for i, tensor in enumerate(tensors):
        positions, size = open_buckets.get(tensor.dtype, ([], 0))
        added = tensor.numel() * tensor.element_size()
        if positions and size + added > BUCKET_BYTES:
            yield positions
            positions, size = [], 0
        open_buckets[tensor.dtype] = ([*positions, i], size + added)
    yield from (positions for positions, _ in open_buckets.values())
