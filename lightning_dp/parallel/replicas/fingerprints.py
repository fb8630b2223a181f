"""Fingerprints of tensors: the sums of their bits, which show a write that nothing else shows.

Not norms: a small change is lost in the rounding of a norm, a NaN is not equal to itself, and types
of 8 bits have no arithmetic. Sums of integers are exact; any one element that changes changes them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_dp.parallel.links import can_be_packed

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WORD = 8  # bytes: sums of large integers are the fastest


def fingerprints(tensors: Iterable[tuple[int, Tensor]]) -> dict[int, int]:
    """By the numbers of tensors, which lie on one device: it is read once, and waited for.

    Left out are those that are more or less than their elements, such as quantised subclasses.
    """
    sums = {
        i: _sum_of_bits(tensor.detach())
        for i, tensor in tensors
        if can_be_packed(tensor) and not tensor.is_meta and tensor.itemsize in _INTEGERS
    }
    if not sums:
        return {}
    return dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True))


def _sum_of_bits(tensor: Tensor) -> Tensor:
    flat = tensor.contiguous().view(-1)
    size = flat.itemsize
    is_aligned = flat.storage_offset() * size % _WORD == 0
    words = flat.numel() * size // _WORD * _WORD // size if is_aligned else 0
    rest = flat[words:].view(_INTEGERS[size]).sum(dtype=torch.int64)
    return flat[:words].view(torch.int64).sum() + rest if words else rest
