"""What torch knows of a tensor's memory, by private names of torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_dp.parallel.torch_private import found

_uses: Callable[[int], int] = found(torch._C, "_storage_Use_Count")
_ALONE = 2  # the tensor, and the storage as an object of Python's


def is_alone_in_memory(tensor: Tensor) -> bool:
    """Whether no other tensor lies in the memory of this one, as views would."""
    return _uses(tensor.untyped_storage()._cdata) == _ALONE
