"""Copies between devices: few large ones instead of many small ones."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

import torch
from torch import Tensor, nn

from lightning_dp.parallel.devices import current_stream
from lightning_dp.parallel.torch_private import copy_to_each

BUCKET_BYTES = 32 * 2**20
"""A bucket is sent once it holds this much; larger tensors travel alone."""


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
        copy_to_each(list(targets), list(sources))
        return
    for positions in _buckets(sources):
        parts = to_device_coalesced([sources[i] for i in positions], targets[0].device)
        copy_to_each([targets[i] for i in positions], parts)


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


def gradients_on(device: torch.device, gradients: list[Tensor | None]) -> list[Tensor | None]:
    """Gradients, which lie on one device, on another one: in few copies, None where it was."""
    first = next((gradient for gradient in gradients if gradient is not None), None)
    if first is None or first.device == device:
        return gradients
    arrived = iter(
        to_device_coalesced([g for g in gradients if g is not None and not g.is_sparse], device)
    )
    return [g if g is None else g.to(device) if g.is_sparse else next(arrived) for g in gradients]


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
