"""Containers: how nested batches and outputs are taken apart and put together again.

Scatter and gather share one idea of what a container is: mappings, lists, tuples, named tuples and
dataclasses. Everything else is a leaf, and so are those objects that are cut as a whole (see
`leaves`), even if they are mappings or named tuples besides.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_dp.parallel.batch.leaves import is_array, kind_of

Path: TypeAlias = tuple[Any, ...]
"""Keys, indices and field names that lead from the root of a tree to one of its nodes."""


@dataclasses.dataclass(frozen=True)
class Attribute:
    """Stands among the keys of a mapping for a list that hangs on it as an attribute.

    The encodings that Hugging Face's tokenizers leave on their batches are such a list.
    """

    name: str


def children(node: Any) -> list[tuple[Any, Any]] | None:
    """The (key, child) pairs of a container, in order; None for a leaf."""
    if type(node) is dict:
        return list(node.items())
    if isinstance(node, list | tuple):
        if hasattr(node, "_fields"):
            fields = zip(node._fields, node, strict=True)
            return None if kind_of(node) else list(fields)
        return list(enumerate(node))
    if type(node) in (Tensor, str, int, float):
        return None
    if isinstance(node, Mapping):
        return None if kind_of(node) else [*node.items(), *_attributes(node)]
    if hasattr(node, "__dataclass_fields__") and not isinstance(node, type) and not kind_of(node):
        names = [field.name for field in dataclasses.fields(node)]
        return [(name, getattr(node, name)) for name in names if hasattr(node, name)]
    return None


def rebuild(node: Any, values: Sequence[Any]) -> Any:
    """A container like `node` with other children; the order is that of `children(node)`.

    Dataclasses, frozen ones too, and mappings of other classes than dict are copied and refilled,
    so that neither `__init__` nor `__post_init__` runs a second time.
    """
    if isinstance(node, list | tuple):
        is_named = hasattr(node, "_fields")
        return type(node)(*values) if is_named else type(node)(values)
    keys = [key for key, _ in children(node) or ()]
    if isinstance(node, Mapping):
        return _rebuild_mapping(node, dict(zip(keys, values, strict=True)))
    clone = _twin(node)
    for key, value in zip(keys, values, strict=True):
        object.__setattr__(clone, key, value)
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


def leaves(node: Any) -> list[Any]:
    """The leaves of a tree, in the order in which `map_leaves` comes to them."""
    pairs = children(node)
    return [node] if pairs is None else [leaf for _, child in pairs for leaf in leaves(child)]


def places(node: Any, path: Path = ()) -> list[tuple[Path, Any]]:
    """The leaves of a tree, each with its path.

    Example:
        >>> places({"a": (1, 2)})
        [(('a', 0), 1), (('a', 1), 2)]
    """
    pairs = children(node)
    if pairs is None:
        return [(path, node)]
    return [place for key, child in pairs for place in places(child, (*path, key))]


def is_list(node: Any) -> bool:
    """Whether a node is a list or a tuple, and not a named one."""
    return isinstance(node, list | tuple) and not hasattr(node, "_fields")


def kind(node: Any) -> tuple[Any, ...]:
    """What containers that belong together have in common.

    It is not the class: one that is made in a call is another one in each replica's call.
    """
    cls = type(node)
    base = next((b for b in (list, tuple, Mapping) if isinstance(node, b)), object)
    return base, cls.__module__, cls.__qualname__, _fields(cls)


def kind_name(node: Any) -> str:
    """The class of a container, and its fields if it has such, for people."""
    fields = _fields(type(node))
    return type(node).__qualname__ + ("" if fields is None else f"({', '.join(fields)})")


def _fields(cls: type) -> tuple[str, ...] | None:
    """Of a dataclass or a class of named tuples; None of others."""
    if dataclasses.is_dataclass(cls):
        return tuple(field.name for field in dataclasses.fields(cls))
    return getattr(cls, "_fields", None) if issubclass(cls, tuple) else None


def equal(a: Any, b: Any) -> bool:
    """Whether two leaves are equal, whatever they are; what does not say yes or no is not.

    Example:
        >>> equal(torch.ones(2), torch.ones(2)), equal(torch.ones(2), torch.ones(3)), equal("a", 1)
        (True, False, False)

    Classes of equal names and fields are: code that makes one in a step makes one on every replica.

        >>> from collections import namedtuple
        >>> a, b, c = (namedtuple("Output", names) for names in (["y"], ["y"], ["z"]))
        >>> equal(a, b), equal(a, c)
        (True, False)
    """
    if a is b:
        return True
    if isinstance(a, type) and isinstance(b, type):
        alike = (a.__module__, a.__qualname__) == (b.__module__, b.__qualname__)
        return alike and _fields(a) is not None and _fields(a) == _fields(b)
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if any(t.is_nested or t.layout is not torch.strided for t in (a, b)):
            return False
        alike = (a.device, a.dtype, a.shape) == (b.device, b.dtype, b.shape)
        return alike and torch.equal(a, b)
    try:
        same = a == b
        return bool(same.all() if is_array(same) and type(a) is type(b) else same)
    except Exception:  # objects whose comparison is no yes or no
        return False


def name(path: Path, root: str = "batch") -> str:
    """A path as one would write it in Python.

    Example:
        >>> name(("image", 0)), name((), "output")
        ("batch['image'][0]", 'output')
    """
    steps = (f".{k.name}" if isinstance(k, Attribute) else f"[{k!r}]" for k in path)
    return root + "".join(steps)


def _attributes(node: Mapping[Any, Any]) -> list[tuple[Attribute, Any]]:
    """Lists that hang on a mapping beside its items; some mappings show items both ways."""
    return [
        (Attribute(name), value)
        for name, value in getattr(node, "__dict__", {}).items()
        if is_list(value) and name not in node
    ]


def _rebuild_mapping(node: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(node) is dict:
        return items
    if isinstance(node, MappingProxyType):
        return MappingProxyType(items)
    attributes = {k.name: v for k, v in items.items() if isinstance(k, Attribute)}
    entries = {k: v for k, v in items.items() if not isinstance(k, Attribute)}
    if not isinstance(node, MutableMapping):
        return type(node)(entries)  # type: ignore[call-arg]  # as all immutable mappings are made
    clone = _independent(node)
    for key, value in entries.items():  # some mappings refuse update()
        clone[key] = value
    if attributes:
        vars(clone).update(attributes)
    return clone


def _independent(node: MutableMapping[Any, Any]) -> Any:
    """A copy of a mapping, to be filled without a change to the original."""
    clone = copy.copy(node)
    if not isinstance(node, dict) and not hasattr(type(node), "__copy__"):
        # Such a copy shares the dict in which the mapping keeps its items.
        own = {key: copy.copy(value) for key, value in vars(node).items() if type(value) is dict}
        vars(clone).update(own)
    return clone


def _twin(node: Any) -> Any:
    """A shallow copy of a dataclass, also of a frozen one with slots."""
    clone = object.__new__(type(node))
    if hasattr(node, "__dict__"):
        clone.__dict__.update(node.__dict__)
    for cls in type(node).__mro__:
        slots = vars(cls).get("__slots__", ())
        for slot in [slots] if isinstance(slots, str) else slots:
            if slot not in ("__dict__", "__weakref__") and hasattr(node, slot):
                object.__setattr__(clone, slot, getattr(node, slot))
    return clone
