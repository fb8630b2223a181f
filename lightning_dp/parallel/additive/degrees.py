"""Degrees: how numbers and lengths of shards follow from how many samples these have."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def grow(lengths: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether lengths differ, in proportion to the shards' samples."""
    pairs = zip(lengths, sizes, strict=True)
    return len({*lengths}) > 1 and all(
        [length * sizes[0] == lengths[0] * size for length, size in pairs]
    )


def degree_of(values: Sequence[Tensor], sizes: Sequence[int]) -> int | None:
    """0 of the same values in all shards, 1 of what is in proportion to their sizes, -1 inversely.

    None of all others, and of nothing.

    Example:
        >>> [degree_of(torch.tensor(values), (3, 2)) for values in ([5, 5], [6, 4], [2, 3], [1, 2])]
        [0, 1, -1, None]
    """
    pairs = [*zip(map(precise, values), sizes, strict=True)] if len(values) else []
    ways = {
        0: [value for value, _ in pairs],
        1: [value / size for value, size in pairs],
        -1: [value * size for value, size in pairs],
    }
    return next((degree for degree, own in ways.items() if own and are_equal(own)), None)


def precise(value: Tensor) -> Tensor:
    """A value to compute with, on the host."""
    dtype = torch.complex128 if value.is_complex() else torch.float64
    return value.detach().to("cpu", dtype)


def are_equal(values: Sequence[Tensor]) -> bool:
    """Whether values are the same but for rounding."""
    return all([torch.allclose(value, values[0], equal_nan=True) for value in values])
