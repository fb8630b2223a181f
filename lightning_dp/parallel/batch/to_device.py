"""Moves the tensors of a batch, or of outputs, to a device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_dp.parallel.batch import tree
from lightning_dp.parallel.batch.leaves import is_movable, kind_of, move
from lightning_dp.parallel.links import Ahead, can_go_ahead, to_device_coalesced


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


def bring(nodes: Sequence[Any], devices: Sequence[torch.device], ahead: Ahead) -> list[Any]:
    """The trees, in which tensors are on the trees' devices that can come while these compute.

    Objects that know how to go to a device are left alone, with all that is in them.
    """
    found: dict[torch.device, list[Tensor]] = {}
    for node, device in zip(nodes, devices, strict=True):
        _map_tensors(partial(_noted, found.setdefault(device, [])), node)
    arrived = {device: iter(own) for device, own in ahead.bring(found).items()}
    if not arrived:
        return list(nodes)
    return [
        _map_tensors(partial(_next, arrived[device]), node) if device in arrived else node
        for node, device in zip(nodes, devices, strict=True)
    ]


def _noted(tensors: list[Tensor], tensor: Tensor) -> Tensor:
    tensors.append(tensor)
    return tensor


def _next(arrived: Iterator[Tensor], _: Tensor) -> Tensor:
    return next(arrived)


def _map_tensors(fn: Callable[[Tensor], Any], node: Any) -> Any:
    """Applies `fn` to the tensors that can go ahead; what has none stays the same object."""
    if isinstance(node, Tensor):
        return fn(node) if can_go_ahead(node) else node
    pairs = None if is_movable(node) else tree.children(node)
    if not pairs:
        return node
    values = [_map_tensors(fn, child) for _, child in pairs]
    is_same = all([value is child for value, (_, child) in zip(values, pairs, strict=True)])
    return node if is_same else tree.rebuild(node, values)


def _is_there(leaf: Any, device: torch.device) -> bool:
    """Whether a leaf need not be moved, as far as one can tell without moving it."""
    if isinstance(leaf, Tensor):
        return leaf.device == device
    return kind_of(leaf) is None and not is_movable(leaf)
