"""Without rows: what a step returns for samples that are not to count."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from lightning_dp.parallel.batch import tree


def without_rows(node: Any, dim: int, n: int) -> Any:
    """Outputs of n samples, of whose tensors the rows are left out; all else stays.

    Example:
        >>> import torch
        >>> without_rows({"y": torch.zeros(2, 3), "mean": torch.tensor(2.0)}, 0, 2)
        {'y': tensor([], size=(0, 3)), 'mean': tensor(2.)}
    """
    return tree.map_leaves(partial(_empty, dim, n), node)


def _empty(dim: int, n: int, leaf: Any) -> Any:
    has_rows = isinstance(leaf, Tensor) and -leaf.dim() <= dim < leaf.dim() and leaf.shape[dim] == n
    return leaf.narrow(dim, 0, 0) if has_rows else leaf
