"""Containers: how nested batches and outputs are taken apart and put together again.

Scatter and gather share one idea of what a container is: mappings, lists, tuples, named tuples and
dataclasses. Everything else is a leaf.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

Path: TypeAlias = tuple[Any, ...]
"""Keys, indices and field names that lead from the root of a tree to one of its nodes."""


def children(node: Any) -> list[tuple[Any, Any]] | None:
    """The (key, child) pairs of a container, in order; None for a leaf."""
    if isinstance(node, Mapping):
        return list(node.items())
    if isinstance(node, list | tuple):
        names = getattr(node, "_fields", None) or range(len(node))
        return list(zip(names, node, strict=True))
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return [(f.name, getattr(node, f.name)) for f in dataclasses.fields(node)]
    return None


def rebuild(node: Any, values: Sequence[Any]) -> Any:
    """A container like `node` with other children; the order is that of `children(node)`.

    Dataclasses, frozen ones too, and mappings of other classes than dict are copied and refilled,
    so that neither `__init__` nor `__post_init__` runs a second time.
    """
    if isinstance(node, Mapping):
        return _rebuild_mapping(node, dict(zip(node, values, strict=True)))
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return type(node)(*values)
    if isinstance(node, list | tuple):
        return type(node)(values)
    clone = copy.copy(node)
    for field, value in zip(dataclasses.fields(node), values, strict=True):
        object.__setattr__(clone, field.name, value)
    return clone


def map_leaves(fn: Callable[[Any], Any], node: Any) -> Any:
    """Applies `fn` to every leaf of a tree.

    Example:
        >>> map_leaves(lambda x: x + 1, {"a": (1, 2), "b": [3]})
        {'a': (2, 3), 'b': [4]}
    """
    pairs = children(node)
    if pairs is None:
        return fn(node)
    return rebuild(node, [map_leaves(fn, child) for _, child in pairs])


def equal(a: Any, b: Any) -> bool:
    """Whether two leaves are equal, whatever they are; what does not say yes or no is not.

    Example:
        >>> equal(torch.ones(2), torch.ones(2)), equal(torch.ones(2), torch.ones(3)), equal("a", 1)
        (True, False, False)
    """
    if a is b:
        return True
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        alike = (a.device, a.dtype, a.shape) == (b.device, b.dtype, b.shape)
        return alike and torch.equal(a, b)
    try:
        return bool(a == b)
    except Exception:  # arrays and others whose comparison is no yes or no
        return False


def name(path: Path) -> str:
    """A path as one would write it in Python.

    Example:
        >>> name(("image", 0)), name(())
        ("batch['image'][0]", 'batch')
    """
    return "batch" + "".join(f"[{key!r}]" for key in path)


def _rebuild_mapping(node: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(node) is dict:
        return items
    clone = copy.copy(node)
    clone.update(items)  # type: ignore[attr-defined]  # every mapping a DataLoader yields is mutable
    return clone
