"""Containers: how nested batches and outputs are taken apart and put together again.

Containers are mappings, lists, tuples, named tuples, dataclasses, `torch.distributions` and the
nodes registered in `torch.utils._pytree`. Everything else is a leaf, and so is an object of a type
in `leaves`, even if it is a mapping or a named tuple besides.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributions import Distribution

from lightning_dp.parallel.scatter.leaves import PLAIN, is_array, leaf_type
from lightning_dp.parallel.torch_private import flatten_node, set_batch_shape, unflatten_node

Path: TypeAlias = tuple[Any, ...]
"""Keys, indices and field names that lead from the root of a tree to one of its nodes."""


@dataclasses.dataclass(frozen=True)
class Attribute:
    """The key of a list that is an attribute of a mapping, not one of its items.

    The encodings that Hugging Face's tokenizers keep on their batches are such a list.
    """

    name: str


def children(node: Any) -> list[tuple[Any, Any]] | None:
    """The (key, child) pairs of a container, in order; None for a leaf."""
    cls = type(node)
    if cls is dict:
        return list(node.items())
    if cls in (list, tuple):
        return list(enumerate(node))
    if cls in PLAIN or isinstance(node, Tensor) or leaf_type(node) is not None:
        return None
    if isinstance(node, list | tuple):
        return list(zip(getattr(node, "_fields", range(len(node))), node, strict=True))
    if isinstance(node, Mapping):
        attributes = getattr(node, "__dict__", {}).items()  # some mappings show items there, too
        lists = [(Attribute(k), v) for k, v in attributes if is_list(v) and k not in node]
        return [*node.items(), *lists]
    if dataclasses.is_dataclass(cls):
        names = [field.name for field in dataclasses.fields(cls)]
        return [(name, getattr(node, name)) for name in names if hasattr(node, name)]
    if isinstance(node, Distribution):
        return _parameters(node)
    flat = flatten_node(node)
    return None if flat is None else list(enumerate(flat))


def rebuild(node: Any, values: Sequence[Any]) -> Any:
    """A container like `node` with other children; the order is that of `children(node)`.

    Mappings other than dict, dataclasses and distributions are copied and refilled, so that neither
    `__init__` nor `__post_init__` runs again.
    """
    if isinstance(node, list | tuple):
        return type(node)(*values) if hasattr(node, "_fields") else type(node)(values)
    items = {key: value for (key, _), value in zip(children(node) or (), values, strict=True)}
    if isinstance(node, Mapping):
        return _rebuild_mapping(node, items)
    if isinstance(node, Distribution):
        return _rebuild_distribution(node, items)
    if not dataclasses.is_dataclass(node):
        return unflatten_node(node, list(values))
    clone: Any = object.__new__(type(node))
    getattr(clone, "__dict__", {}).update(getattr(node, "__dict__", {}))
    for key, value in items.items():
        object.__setattr__(clone, key, value)  # frozen ones, too
    return clone


def map_leaves(fn: Callable[[Any], Any], node: Any) -> Any:
    """Applies `fn` to every leaf of a tree."""
    pairs = children(node)
    if pairs is None:
        return fn(node)
    return rebuild(node, [map_leaves(fn, child) for _, child in pairs])


def places(node: Any, path: Path = ()) -> list[tuple[Path, Any]]:
    """The leaves of a tree, each with its path, in the order of `map_leaves`.

    Example:
        >>> places({"a": (1, 2)})
        [(('a', 0), 1), (('a', 1), 2)]
    """
    pairs = children(node)
    if pairs is None:
        return [(path, node)]
    return [place for key, child in pairs for place in places(child, (*path, key))]


def leaves(node: Any) -> list[Any]:
    """The leaves of a tree, in the order of `map_leaves`."""
    return [leaf for _, leaf in places(node)]


def is_list(node: Any) -> bool:
    """Whether a node is a list or a tuple, and not a named one."""
    return isinstance(node, list | tuple) and not hasattr(node, "_fields")


def kind_name(node: Any) -> str:
    """The name of a container's class, with its fields if it is a named tuple or dataclass.

    Containers of equal module and kind_name belong together: a class that a step defines is another
    object in each replica.
    """
    cls = type(node)
    names = getattr(cls, "_fields", None) if issubclass(cls, tuple) else None
    if dataclasses.is_dataclass(cls):
        names = tuple(field.name for field in dataclasses.fields(cls))
    return cls.__qualname__ + ("" if names is None else f"({', '.join(names)})")


def equal(a: Any, b: Any) -> bool:
    """Whether two leaves are equal; False where their comparison is neither true nor false."""
    if a is b:
        return True
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if any(t.is_nested or t.layout is not torch.strided for t in (a, b)):
            return False
        alike = (a.device, a.dtype, a.shape) == (b.device, b.dtype, b.shape)
        return alike and torch.equal(a, b)
    try:
        same = a == b
        return bool(same.all() if is_array(same) and type(a) is type(b) else same)
    except Exception:  # a comparison of somebody's class may raise anything
        return False


def name(path: Path, root: str = "batch") -> str:
    """A path as Python code.

    Example:
        >>> name(("image", 0)), name((), "output")
        ("batch['image'][0]", 'output')
    """
    steps = (f".{k.name}" if isinstance(k, Attribute) else f"[{k!r}]" for k in path)
    return root + "".join(steps)


def _rebuild_mapping(node: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(node) is dict:
        return items
    attributes = {k.name: v for k, v in items.items() if isinstance(k, Attribute)}
    entries = {k: v for k, v in items.items() if not isinstance(k, Attribute)}
    if not isinstance(node, MutableMapping):
        return type(node)(entries)  # type: ignore[call-arg]  # immutable mappings are made like that
    clone = copy.copy(node)
    if not isinstance(node, dict) and not hasattr(type(node), "__copy__"):
        # The copy shares the dict in which the mapping keeps its items.
        inner = {key: copy.copy(value) for key, value in vars(node).items() if type(value) is dict}
        vars(clone).update(inner)
    for key, value in entries.items():  # some mappings refuse update()
        clone[key] = value
    if attributes:
        vars(clone).update(attributes)
    return clone


def _parameters(node: Distribution) -> list[tuple[Any, Any]] | None:
    """Tensors and distributions in a distribution; None if it has other objects in it."""
    known = (Tensor, Distribution, bool, int, float, str, type(None), torch.Size)
    if not all(isinstance(value, known) for value in vars(node).values()):
        return None
    return [(k, v) for k, v in vars(node).items() if isinstance(v, Tensor | Distribution)]


def _rebuild_distribution(node: Distribution, items: Mapping[str, Any]) -> Distribution:
    """A distribution with other parameters, and the batch shape that follows from these."""
    clone, old = copy.copy(node), node.batch_shape
    vars(clone).update(items)
    for key, after in items.items():
        shapes = [
            getattr(x, "batch_shape", getattr(x, "shape", ())) for x in (vars(node)[key], after)
        ]
        if shapes[0][: len(old)] == old:
            set_batch_shape(clone, torch.Size(shapes[1][: len(old)]))
            break
    return clone
