"""What batches and outputs consist of: leaves, and the containers that they are in.

Leaves that hold samples are tensors (MONAI's `MetaTensor` with its records), NumPy arrays, packed
sequences, PyTorch Geometric's batches and TensorDicts: `leaf_type` says how each is counted, cut
and joined. Types of other libraries are recognised by what they can do, so that the engine imports
none.

Containers are mappings, lists, tuples, named tuples, dataclasses, `torch.distributions` and the
nodes registered in `torch.utils._pytree`. Everything else is a leaf, and so is an object that
`leaf_type` knows, even if it is a mapping or a named tuple besides.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributions import Distribution
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from lightning_dp.parallel.split import Sizes
from lightning_dp.parallel.torch_private import flatten_node, set_batch_shape, unflatten_node

PLAIN = frozenset({str, int, float, bool, type(None), bytes, list, tuple, dict})
"""Types that are looked up first, because most nodes of a batch have one of them."""

Path: TypeAlias = tuple[Any, ...]
"""Keys, indices and field names that lead from the root of a tree to one of its nodes."""


# --- Leaves


class LeafType(NamedTuple):
    """What scatter and gather do with one type of leaf.

    `size(leaf, dim)` is its number of samples, None if there are none along `dim`; `cut(leaf,
    sizes, dim)` gives one piece per size, none of which is 0; `join(pieces, dim)` undoes that.
    """

    size: Callable[[Any, int], int | None]
    cut: Callable[[Any, Sizes, int], list[Any]]
    join: Callable[[Sequence[Any], int], Any]


def leaf_type(node: Any) -> LeafType | None:
    """The type of a leaf that may hold samples; None for containers and all other leaves."""
    cls = type(node)
    if cls in PLAIN:
        return None
    if isinstance(node, Tensor):
        return _META_TENSORS if cls is not Tensor and _has_records(node) else TENSORS
    if isinstance(node, PackedSequence):
        return _PACKED
    if is_array(node):
        return _ARRAYS if node.ndim else None
    if not is_movable(node):
        return None
    if all(hasattr(node, name) for name in ("to_data_list", "from_data_list", "num_graphs")):
        return _GRAPHS
    if hasattr(cls, "__torch_function__") and isinstance(getattr(node, "batch_size", None), tuple):
        return _TENSOR_DICTS if node.batch_size else None  # without batch dimensions: a mapping
    return None


def size_of(node: Any, dim: int) -> int | None:
    """The number of samples in a node that is a leaf and has any along `dim`."""
    kind = leaf_type(node)
    return None if kind is None else kind.size(node, dim)


def is_array(node: Any) -> bool:
    """Whether a node is an array or a scalar of NumPy, which the engine does not import."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(node, numpy.ndarray | numpy.generic)


def is_movable(node: Any) -> bool:
    """Whether a node is an object with a method `to`, and neither a tensor nor a module."""
    is_known = type(node) in PLAIN or isinstance(node, Tensor | nn.Module)
    return not is_known and callable(getattr(type(node), "to", None))


def move(leaf: Any, device: torch.device) -> Any:
    """A leaf on a device, as the same object if it is there or has nothing to move."""
    if isinstance(leaf, Tensor | PackedSequence):
        to: Any = leaf.to
        # Copies to the CPU are finished on return, because its readers do not wait for the device.
        return like(leaf, to(device, non_blocking=device.type != "cpu"))
    if not is_movable(leaf):
        return leaf
    moved = copy.copy(leaf)  # many a `to` changes the object itself and returns nothing
    result = moved.to(device)
    return moved if result is None else result


def slices(leaf: Any, sizes: Sizes, dim: int = 0) -> list[Any]:
    """Consecutive slices of these sizes along a dimension."""
    before, stops = (slice(None),) * dim, list(accumulate(sizes))
    pieces = [slice(stop - size, stop) for stop, size in zip(stops, sizes, strict=True)]
    return [leaf[(*before, piece) if dim else piece] for piece in pieces]


def _rows(shape: Sequence[int], dim: int) -> int | None:
    return int(shape[dim]) if -len(shape) <= dim < len(shape) else None


def _tensor_size(leaf: Tensor, dim: int) -> int | None:
    if leaf.is_nested:
        return leaf.size(0) if dim == 0 else None
    return _rows(leaf.shape, dim)


def _cut_tensor(leaf: Tensor, sizes: Sizes, dim: int) -> list[Tensor]:
    # `split` would return views of one node, which raise when one is written to in place.
    pieces = [
        like(leaf, leaf.narrow(dim, stop - size, size))
        for stop, size in zip(accumulate(sizes), sizes, strict=True)
    ]
    # Views share a version counter: a replica that writes to its piece in place would seem to have
    # written to what the others saved for their backward. `.data` has a counter of its own.
    has_derivatives = leaf.requires_grad or forward_ad.unpack_dual(leaf).tangent is not None
    return pieces if has_derivatives else [like(leaf, piece.data) for piece in pieces]


def like(leaf: Any, rows: Any) -> Any:
    """Rows of a leaf as a tensor of its class, with its attributes, if they are a plain one."""
    if type(rows) is Tensor and type(leaf) not in (Tensor, nn.Parameter, nn.Buffer):
        rows = rows.as_subclass(type(leaf))
        vars(rows).update(vars(leaf))
    return rows


def _cat(leaves: Sequence[Any], dim: int) -> Any:
    if isinstance(leaves[0], Tensor) and leaves[0].is_nested:
        rows = [row for leaf in leaves for row in leaf.unbind()]
        return torch.nested.as_nested_tensor(rows, layout=leaves[0].layout)
    return like(leaves[0], torch.cat(list(leaves), dim))


def _has_records(node: Tensor) -> bool:
    """Whether a MetaTensor has a record for each of its rows."""
    records = getattr(node, "applied_operations", None)
    is_batch = getattr(node, "is_batch", False) and "monai.data" in sys.modules
    return is_batch and isinstance(records, list) and node.dim() > 0 and len(records) == len(node)


def _join_meta_tensors(leaves: Sequence[Tensor], dim: int) -> Any:
    monai = sys.modules["monai.data"]
    samples = [sample for leaf in leaves for sample in monai.decollate_batch(leaf, detach=False)]
    return _cat(leaves, dim) if dim else monai.list_data_collate(samples)


def _cut_packed(leaf: PackedSequence, sizes: Sizes, dim: int) -> list[PackedSequence]:
    """By samples in the order before packing."""
    parts = slices(unpack_sequence(leaf), sizes)
    return [pack_sequence(part, enforce_sorted=leaf.sorted_indices is None) for part in parts]


def _join_packed(leaves: Sequence[PackedSequence], dim: int) -> PackedSequence:
    sequences = [sequence for leaf in leaves for sequence in unpack_sequence(leaf)]
    lengths = [len(sequence) for sequence in sequences]
    is_sorted = all(leaf.sorted_indices is None for leaf in leaves)
    is_sorted = is_sorted and lengths == sorted(lengths, reverse=True)
    return pack_sequence(sequences, enforce_sorted=is_sorted)


def _batch_graphs(like: Any, graphs: list[Any]) -> Any:
    # The batch's class is made at run time, of Batch and of the class of the graphs.
    maker: Any = next(base for base in type(like).__mro__ if "from_data_list" in vars(base))
    keys = set(like.keys() if callable(like.keys) else like.keys)
    followed = sorted(k for k in keys if {f"{k}_batch", f"{k}_ptr"} <= keys)
    return maker.from_data_list(graphs, **({"follow_batch": followed} if followed else {}))


TENSORS = LeafType(_tensor_size, _cut_tensor, _cat)
_META_TENSORS = LeafType(_tensor_size, slices, _join_meta_tensors)  # `narrow` keeps all records
_ARRAYS = LeafType(
    lambda leaf, dim: _rows(leaf.shape, dim),
    lambda leaf, sizes, dim: slices(leaf, sizes, dim % leaf.ndim),
    lambda leaves, dim: sys.modules["numpy"].concatenate(leaves, dim),
)
_PACKED = LeafType(lambda leaf, dim: int(leaf.batch_sizes[0]), _cut_packed, _join_packed)
_GRAPHS = LeafType(
    lambda leaf, dim: int(leaf.num_graphs),
    lambda leaf, sizes, dim: [_batch_graphs(leaf, p) for p in slices(leaf.to_data_list(), sizes)],
    lambda leaves, dim: _batch_graphs(leaves[0], [g for x in leaves for g in x.to_data_list()]),
)
_TENSOR_DICTS = LeafType(
    lambda leaf, dim: _rows(leaf.batch_size, dim),
    lambda leaf, sizes, dim: slices(leaf, sizes, dim % len(leaf.batch_size)),
    _cat,
)

# --- Containers


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
        names += getattr(node, "__dict__", ())  # and what `__post_init__` has made of them
        return [(n, getattr(node, n)) for n in dict.fromkeys(names) if hasattr(node, n)]
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
        return type(node)(*values) if hasattr(node, "_fields") else of_list(node, values)
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


def of_list(node: Any, items: Iterable[Any]) -> Any:
    """A list or tuple of the class of `node`, of a list also with its attributes."""
    if type(node) in PLAIN or isinstance(node, tuple):
        return type(node)(items)
    clone = copy.copy(node)
    clone[:] = items
    return clone


def _rebuild_mapping(node: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(node) is dict:
        return items
    cls: Any = type(node)
    attributes = {k.name: v for k, v in items.items() if isinstance(k, Attribute)}
    entries = {k: v for k, v in items.items() if not isinstance(k, Attribute)}
    if not isinstance(node, dict) and not hasattr(cls, "__copy__"):
        return cls(entries)  # a copy would share the dict in which the mapping keeps its items
    if hasattr(cls, "__dataclass_fields__") and isinstance(node, dict):
        clone = cls.__new__(cls)  # `OrderedDict.copy` would call `__init__`
        vars(clone).update(vars(node))
    else:
        clone = copy.copy(node)
    for key, value in entries.items():  # some mappings refuse update()
        clone[key] = value
    own = getattr(node, "__dict__", {}).items()
    attributes |= {k: entries[k] for k, v in own if k in entries and v is node[k]}  # as items
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
    clone = copy.copy(node)
    vars(clone).update(items)
    for key, after in items.items():
        if is_of_batch(node, key):
            set_batch_shape(clone, torch.Size(_shape(after)[: len(node.batch_shape)]))
            break
    return clone


def is_of_batch(node: Distribution, name: str) -> bool:
    """Whether a parameter of a distribution has the batch's dimensions before its own."""
    shape, batch = _shape(vars(node)[name]), node.batch_shape
    own: Any = node.arg_constraints.get(name.removeprefix("_unbroadcasted_"))
    num_dims = len(batch) + getattr(own, "event_dim", 0)
    return len(shape) >= num_dims and bool(shape[: len(batch)] == batch)


def _shape(parameter: Any) -> Any:
    return getattr(parameter, "batch_shape", getattr(parameter, "shape", ()))


# --- Walks, and comparisons


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
    except Exception:  # `__eq__` of a user's class may raise anything
        return False


def name(path: Path, root: str = "batch") -> str:
    """A path as Python code.

    Example:
        >>> name(("image", 0)), name((), "output")
        ("batch['image'][0]", 'output')
    """
    steps = (f".{k.name}" if isinstance(k, Attribute) else f"[{k!r}]" for k in path)
    return root + "".join(steps)
