"""What torch knows of a tensor's memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_dp.parallel.torch_private.found import found

_uses: Callable[[int], int] = found(torch._C, "_storage_Use_Count")
_ALONE = 2  # the tensor, and the storage as an object of Python's

uses: Callable[[Tensor], int] = found(Tensor, "_use_count")
"""How many objects of C++ hold a tensor, one of them for its Python object."""


def uses_of_memory(memory: torch.UntypedStorage) -> int:
    """How many tensors, and objects of Python such as this one, have this memory."""
    return _uses(memory._cdata)


def is_alone_in_memory(tensor: Tensor) -> bool:
    """Whether no other tensor lies in the memory of this one, as views would."""
    return uses_of_memory(tensor.untyped_storage()) == _ALONE


def add_as_read(sums: Sequence[Tensor], terms: Sequence[Tensor], error: RuntimeError) -> None:
    """Adds a term to each tensor, where `add_to_each` has raised this error.

    It refuses, before it adds anything, what torch conjugates or negates only as it reads it.
    """
    if not any([own.is_conj() or own.is_neg() for own in (*sums, *terms)]):
        raise error
    for own, term in zip(sums, terms, strict=True):
        own.add_(term)
