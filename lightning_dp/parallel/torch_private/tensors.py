"""Tensors: how often they were written to, and many at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from lightning_dp.parallel.torch_private.found import found, getter

Tensors: TypeAlias = Sequence[Tensor]

version: Callable[[Tensor], int] = getter(Tensor, "_version")
"""How often a tensor was written to, though not through `.data`. Inference tensors raise."""

add_to_each: Callable[[Tensors, Tensors], None] = found(torch, "_foreach_add_")
"""Adds a term to each tensor, in place: few kernels for many tensors. See `add_as_read`."""

copy_to_each: Callable[[Tensors, Tensors], None] = found(torch, "_foreach_copy_")
"""Copies into each tensor of the first list what is in the second: few kernels."""

norm_of_each: Callable[[Tensors], Tensors] = found(torch, "_foreach_norm")
"""The 2-norm of each tensor, without dimension: few kernels."""

flattened: Callable[[Tensors], Tensor] = found(torch._utils, "_flatten_dense_tensors")
"""Tensors in one of a single dimension, without a Python call for each; it may be a view of one."""
