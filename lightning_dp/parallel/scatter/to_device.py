"""Moves the tensors of a batch, or of outputs, to a device."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_dp.parallel.comm import to_device_coalesced
from lightning_dp.parallel.scatter import tree
from lightning_dp.parallel.scatter.leaves import is_movable, leaf_type, move


def to_device(node: Any, device: torch.device) -> Any:
    """Moves the tensors of a tree; those already on `device` stay the same objects.

    Objects that know how to go to a device (graphs, TensorDicts, packed sequences) are moved as
    copies. Copies to an accelerator are asynchronous where the source is pinned or on an
    accelerator; copies to the CPU are finished on return.

    Example:
        >>> to_device({"x": torch.zeros(2), "name": "a"}, torch.device("cpu"))
        {'x': tensor([0., 0.]), 'name': 'a'}
    """
    return tree.map_leaves(lambda leaf: move(leaf, device), node)


def to_device_together(
    nodes: Sequence[Any], device: torch.device, *, later: Collection[torch.device] = ()
) -> list[Any]:
    """As `to_device` for several trees, but with few copies per source device and dtype.

    Differentiable. On return the results may be read, whatever the device; but on the host not
    those from devices of which the caller says that it will wait for them `later`.
    """
    leaves = [leaf for node in nodes for leaf in tree.leaves(node)]
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if all(_is_there(leaf, device) for leaf in leaves):
        return list(nodes)
    arrived = iter(to_device_coalesced(tensors, device, later=later))

    def moved(leaf: Any) -> Any:
        return next(arrived) if isinstance(leaf, Tensor) else move(leaf, device)

    return [tree.map_leaves(moved, node) for node in nodes]


def _is_there(leaf: Any, device: torch.device) -> bool:
    """Whether a leaf need not be moved, as far as one can tell without moving it."""
    if isinstance(leaf, Tensor):
        return leaf.device == device
    return leaf_type(leaf) is None and not is_movable(leaf)
