"""Leaves that hold samples: how each type is counted, cut, joined and moved.

There are tensors (MONAI's `MetaTensor` with its records), NumPy arrays, packed sequences, PyTorch
Geometric's batches, TensorDicts, and objects with `to`, a length and slices. Types of other
libraries are recognised by what they can do, so that the engine imports none. Further ones are
added by `register_leaf_type`.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from lightning_dp.parallel.split import Sizes

PLAIN = frozenset({str, int, float, bool, type(None), bytes, list, tuple, dict})
"""Types that are looked up first, because most nodes of a batch have one of them."""


class CannotCut(TypeError):
    """A leaf has samples but no way to cut it; the message completes "Expected a leaf ..."."""


def _copy_to(leaf: Any, device: torch.device) -> Any:
    """A shallow copy, moved: many a `to` changes the object itself and returns nothing."""
    moved = copy.copy(leaf)
    result = moved.to(device)
    return moved if result is None else result


class LeafType(NamedTuple):
    """What scatter and gather do with one type of leaf.

    `size(leaf, dim)` is its number of samples, None if there are none along `dim`; `cut(leaf,
    sizes, dim)` gives one piece per size, none of which is 0; `join(pieces, dim)` undoes that;
    `to(leaf, device)` moves it, by default a copy of it with its own method `to`.
    """

    size: Callable[[Any, int], int | None]
    cut: Callable[[Any, Sizes, int], list[Any]]
    join: Callable[[Sequence[Any], int], Any]
    to: Callable[[Any, torch.device], Any] = _copy_to


_REGISTERED: dict[type, LeafType] = {}


def register_leaf_type(cls: type, kind: LeafType) -> None:
    """Says how objects of a class and its subclasses are counted, cut, joined and moved.

    For classes that are no container and have no `to`, length and slices, or whose slices are not
    samples. A class that is registered again replaces its entry.
    """
    if not isinstance(cls, type):
        raise TypeError(f"register_leaf_type: expected a class, got {type(cls).__qualname__}.")
    _REGISTERED[cls] = kind


def leaf_type(node: Any) -> LeafType | None:
    """The type of a leaf that may hold samples; None for containers and all other leaves."""
    cls = type(node)
    if cls is Tensor:
        return TENSORS
    if cls in PLAIN:
        return None
    for base in cls.__mro__ if _REGISTERED else ():
        if base in _REGISTERED:
            return _REGISTERED[base]
    if isinstance(node, Tensor):
        return _META_TENSORS if _has_records(node) else TENSORS
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
    has_slices = hasattr(cls, "__len__") and hasattr(cls, "__getitem__")
    is_container = hasattr(cls, "__dataclass_fields__") or isinstance(node, list | tuple)
    return _SLICEABLES if has_slices and not is_container and not hasattr(cls, "keys") else None


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
    kind = leaf_type(leaf)
    if kind is not None:
        return kind.to(leaf, device)
    return _copy_to(leaf, device) if is_movable(leaf) else leaf


def pick(leaf: Any, samples: Sequence[int], dim: int) -> Any:
    """Some samples of a leaf, in the order in which they are named.

    Raises:
        CannotCut: single samples of the leaf cannot be joined.
    """
    kind = leaf_type(leaf)
    if kind is None:
        raise CannotCut("with samples in it")
    if kind is TENSORS and leaf.layout is torch.strided and not leaf.is_nested:
        return leaf.index_select(dim, torch.tensor(samples).to(leaf.device, non_blocking=True))
    singles = kind.cut(leaf, (1,) * (kind.size(leaf, dim) or 0), dim)
    picked = kind.join([singles[i] for i in samples], dim)
    if isinstance(picked, list):
        raise CannotCut("of a class with a method cat, to be put in another order")
    return picked


def slices(leaf: Any, sizes: Sizes, dim: int = 0) -> list[Any]:
    """Consecutive slices of these sizes along a dimension."""
    before = (slice(None),) * dim
    pieces = [slice(start, stop) for start, stop in _ranges(sizes)]
    return [leaf[(*before, piece) if dim else piece] for piece in pieces]


def _ranges(sizes: Sizes) -> list[tuple[int, int]]:
    stops = list(accumulate(sizes))
    return list(zip([0, *stops], stops, strict=False))


# --- tensors


def _rows(shape: Sequence[int], dim: int) -> int | None:
    return int(shape[dim]) if -len(shape) <= dim < len(shape) else None


def _tensor_size(leaf: Tensor, dim: int) -> int | None:
    if leaf.is_nested:
        return leaf.size(0) if dim == 0 else None
    return _rows(leaf.shape, dim)


def _cut_tensor(leaf: Tensor, sizes: Sizes, dim: int) -> list[Tensor]:
    if leaf.layout is torch.sparse_coo and not leaf.requires_grad:
        rows = [torch.arange(*ends, device=leaf.device) for ends in _ranges(sizes)]
        return [leaf.index_select(dim, index) for index in rows]
    if leaf.is_nested or leaf.layout is not torch.strided:
        raise CannotCut("of strided layout (or sparse COO without gradient)")
    # `split` would return views of one node, which raise when one is written to in place.
    pieces = [leaf.narrow(dim, start, stop - start) for start, stop in _ranges(sizes)]
    # Views share a version counter: a replica that writes to its piece in place would seem to have
    # written to what the others saved for their backward. `.data` has a counter of its own.
    has_derivatives = leaf.requires_grad or forward_ad.unpack_dual(leaf).tangent is not None
    return pieces if has_derivatives else [piece.data for piece in pieces]


def _cat(leaves: Sequence[Any], dim: int) -> Any:
    return torch.cat(list(leaves), dim)


def _move_tensor(leaf: Any, device: torch.device) -> Any:
    # Copies to the CPU are finished on return, because its readers do not wait for the device.
    return leaf.to(device, non_blocking=device.type != "cpu")


TENSORS = LeafType(_tensor_size, _cut_tensor, _cat, _move_tensor)


def _has_records(node: Tensor) -> bool:
    """Whether a MetaTensor has a record for each of its rows."""
    records = getattr(node, "applied_operations", None)
    is_batch = getattr(node, "is_batch", False) and "monai.data" in sys.modules
    return is_batch and isinstance(records, list) and node.dim() > 0 and len(records) == len(node)


def _samples_with_records(leaf: Tensor) -> list[Any]:
    samples: list[Any] = sys.modules["monai.data"].decollate_batch(leaf.detach(), detach=False)
    return samples


def _give_records(leaf: Tensor, samples: list[Any]) -> Tensor:
    vars(leaf).update(vars(sys.modules["monai.data"].list_data_collate(samples)))
    return leaf


def _cut_meta_tensor(leaf: Tensor, sizes: Sizes, dim: int) -> list[Tensor]:
    """`narrow` gives each piece the records of the whole batch: each gets those of its samples."""
    pieces = _cut_tensor(leaf, sizes, dim)
    if dim == 0:
        parts = slices(_samples_with_records(leaf), sizes)
        pieces = [_give_records(*pair) for pair in zip(pieces, parts, strict=True)]
    return pieces


def _join_meta_tensors(leaves: Sequence[Tensor], dim: int) -> Tensor:
    samples = [sample for leaf in leaves for sample in _samples_with_records(leaf)]
    joined: Tensor = _cat(leaves, dim)
    return joined if dim else _give_records(joined, samples)


_META_TENSORS = LeafType(_tensor_size, _cut_meta_tensor, _join_meta_tensors, _move_tensor)


# --- arrays and objects

_ARRAYS = LeafType(
    lambda leaf, dim: _rows(leaf.shape, dim),
    lambda leaf, sizes, dim: slices(leaf, sizes, dim % leaf.ndim),
    lambda leaves, dim: sys.modules["numpy"].concatenate(leaves, dim),
    lambda leaf, device: leaf,  # arrays stay on the CPU
)


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


_PACKED = LeafType(
    lambda leaf, dim: int(leaf.batch_sizes[0]), _cut_packed, _join_packed, _move_tensor
)


def _batch_graphs(like: Any, graphs: list[Any]) -> Any:
    # The batch's class is made at run time, of Batch and of the class of the graphs.
    maker: Any = next(base for base in type(like).__mro__ if "from_data_list" in vars(base))
    keys = set(like.keys() if callable(like.keys) else like.keys)
    followed = sorted(k for k in keys if {f"{k}_batch", f"{k}_ptr"} <= keys)
    return maker.from_data_list(graphs, **({"follow_batch": followed} if followed else {}))


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


def _join_sliceables(leaves: Sequence[Any], dim: int) -> Any:
    cat = getattr(type(leaves[0]), "cat", None)
    return cat(list(leaves)) if callable(cat) else list(leaves)


_SLICEABLES = LeafType(
    lambda leaf, dim: len(leaf), lambda leaf, sizes, dim: slices(leaf, sizes), _join_sliceables
)
