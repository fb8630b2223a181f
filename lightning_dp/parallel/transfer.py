"""Copies between devices: few large ones instead of many small ones."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dp.parallel import tree
from lightning_dp.parallel.devices import current_stream
from lightning_dp.parallel.leaves import is_movable, kind_of, move

BUCKET_BYTES = 32 * 2**20
"""A bucket is sent once it holds this much; larger tensors travel alone."""


def to_device(node: Any, device: torch.device) -> Any:
    """Moves the tensors of a tree; those already on `device` stay the same objects.

    Objects that know how to go to a device (graphs, TensorDicts, packed sequences) are moved as
    copies. Copies to an accelerator are asynchronous where the source is pinned or on an
    accelerator; copies to the CPU are finished on return.

    Args:
        node: a tensor, or nested containers of tensors and other leaves.
        device: where to.

    Example:
        >>> to_device({"x": torch.zeros(2), "name": "a"}, torch.device("cpu"))
        {'x': tensor([0., 0.]), 'name': 'a'}
    """
    return tree.map_leaves(lambda leaf: move(leaf, device), node)


def to_device_together(nodes: Sequence[Any], device: torch.device) -> list[Any]:
    """As `to_device` for several trees, but with few copies per source device and dtype.

    Differentiable. On return the results may be read, whatever the device.
    """
    leaves = [leaf for node in nodes for leaf in tree.leaves(node)]
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if all(_is_there(leaf, device) for leaf in leaves):
        return list(nodes)
    arrived = iter(to_device_coalesced(tensors, device))

    def moved(leaf: Any) -> Any:
        return next(arrived) if isinstance(leaf, Tensor) else move(leaf, device)

    return [tree.map_leaves(moved, node) for node in nodes]


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
    """The tensors on `device`; those from one device and of one dtype share one copy's memory.

    Differentiable. All copies are issued before any is waited for, and only those to the CPU are:
    work on an accelerator waits for what it reads, the host does not.

    Args:
        tensors: tensors on any devices; those on `device` stay the same objects.
        device: where to.

    Example:
        >>> to_device_coalesced([torch.ones(2)], torch.device("cpu"))
        [tensor([1., 1.])]
    """
    moved = list(tensors)
    sources = {tensor.device for tensor in tensors} - {device}
    for source in sources:
        away = [i for i, tensor in enumerate(tensors) if tensor.device == source]
        for bucket in _buckets([tensors[i] for i in away]):
            positions = [away[j] for j in bucket]
            parts = _sent([tensors[i] for i in positions], device)
            for i, part in zip(positions, parts, strict=True):
                moved[i] = part
    if device.type == "cpu":
        for source in sources:
            _wait_for_copies(source)
    return moved


def _is_there(leaf: Any, device: torch.device) -> bool:
    """Whether a leaf need not be moved, as far as one can tell without moving it."""
    if isinstance(leaf, Tensor):
        return leaf.device == device
    return kind_of(leaf) is None and not is_movable(leaf)


def _sent(bucket: Sequence[Tensor], device: torch.device) -> Sequence[Tensor]:
    """The tensors of a bucket after one copy, which may still be under way."""
    if len(bucket) == 1:
        return [bucket[0].to(device, non_blocking=True)]
    packed = torch.cat([tensor.reshape(-1) for tensor in bucket])
    # Autograd takes the parts of `split` for views of one tensor and refuses to change them in
    # place. Nobody else has this one.
    parts = torch.unsafe_split_with_sizes(
        packed.to(device, non_blocking=True), [tensor.numel() for tensor in bucket]
    )
    return [part.view(tensor.shape) for part, tensor in zip(parts, bucket, strict=True)]


def _wait_for_copies(source: torch.device) -> None:
    """Lets the host wait for the copies that this thread has issued from a device to the CPU."""
    stream = current_stream(source)
    if stream is not None:
        stream.synchronize()
    elif source.type != "cpu":
        torch.get_device_module(source).synchronize()


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """Positions of tensors that travel together: of one kind, at most a bucket's bytes."""
    open_buckets: dict[Hashable, tuple[list[int], int]] = {}
    for i, tensor in enumerate(tensors):
        if not _can_be_packed(tensor):
            yield [i]
            continue
        # Together, those without a gradient would come out as if they had one.
        kind = tensor.dtype, tensor.requires_grad and torch.is_grad_enabled()
        positions, size = open_buckets.get(kind, ([], 0))
        added = tensor.numel() * tensor.element_size()
        if positions and size + added > BUCKET_BYTES:
            yield positions
            positions, size = [], 0
        open_buckets[kind] = ([*positions, i], size + added)
    yield from (positions for positions, _ in open_buckets.values())


def _can_be_packed(tensor: Tensor) -> bool:
    is_plain = type(tensor) in (Tensor, nn.Parameter)
    return is_plain and tensor.layout is torch.strided and not tensor.is_nested
