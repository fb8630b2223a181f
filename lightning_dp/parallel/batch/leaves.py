"""Leaves with samples in them: how each kind is counted, cut, joined and moved.

A leaf is what scatter and gather take as a whole. Kinds of other libraries are told by what they
can do, not by their class, so that the engine depends on none of them:

| kind                                      | size            | cut          | joined by        |
|-------------------------------------------|-----------------|--------------|------------------|
| tensor                                    | along `dim`     | views        | `torch.cat`      |
| MONAI's `MetaTensor` of a batch           | along `dim`     | views        | `torch.cat`      |
| NumPy array                               | along `dim`     | views        | its concatenate  |
| `PackedSequence`                          | its sequences   | packed again | packing again    |
| PyTorch Geometric's `Batch`               | `num_graphs`    | batched anew | `from_data_list` |
| TensorDict: `batch_size`, torch functions | along `dim`     | views        | `torch.cat`      |
| `to`, a length and slices, without `keys` | its length      | sliced       | its class's      |
|                                           |                 |              | `cat`, or a list |
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from lightning_dp.parallel.split import Sizes


class CannotCut(TypeError):
    """A leaf has samples but no way to cut it; the message says why, without the leaf's name."""


class Kind:
    """What scatter and gather need to know about one kind of leaf."""

    def size(self, leaf: Any, dim: int) -> int | None:
        """The number of samples, or None if the leaf has none along `dim`."""
        return len(leaf)

    def cut(self, leaf: Any, sizes: Sizes, dim: int) -> list[Any]:
        """One piece per size; the sizes sum to the leaf's size, and none is 0."""
        return slices(leaf, sizes)

    def join(self, leaves: Sequence[Any], dim: int) -> Any:
        """What `cut` would have made these pieces of."""
        return torch.cat(list(leaves), dim)

    def to(self, leaf: Any, device: torch.device) -> Any:
        """The leaf on a device; many a `to` moves the object itself, which others may have too."""
        moved = copy.copy(leaf)
        result = moved.to(device)
        return moved if result is None else result  # as in Lightning, `to` need not return


class _Tensors(Kind):
    def size(self, leaf: Tensor, dim: int) -> int | None:
        if leaf.is_nested:
            return leaf.size(0) if dim == 0 else None
        rank = leaf.dim()
        return leaf.size(dim) if -rank <= dim < rank else None

    def cut(self, leaf: Tensor, sizes: Sizes, dim: int) -> list[Tensor]:
        if leaf.layout is torch.sparse_coo and not leaf.requires_grad:
            rows = [torch.arange(*ends, device=leaf.device) for ends in _ranges(sizes)]
            return [leaf.index_select(dim, index) for index in rows]
        if leaf.is_nested or leaf.layout is not torch.strided:
            raise CannotCut("of strided layout (or sparse COO without gradient)")
        # Pieces of `split` are views of several outputs, on which in-place ops raise.
        pieces = [leaf.narrow(dim, start, stop - start) for start, stop in _ranges(sizes)]
        # Views share a version counter: one replica that writes to its piece would seem to have
        # written to what the others have saved for their backward.
        has_derivatives = leaf.requires_grad or forward_ad.unpack_dual(leaf).tangent is not None
        return pieces if has_derivatives else [piece.data for piece in pieces]

    def to(self, leaf: Tensor, device: torch.device) -> Tensor:
        return leaf.to(device, non_blocking=_may_overlap(device))


class _MetaTensors(_Tensors):
    """Tensors with a record of every sample, as MONAI makes them, which goes where the sample goes.

    Neither `narrow` nor `torch.cat` cuts or joins these records.
    """

    def cut(self, leaf: Tensor, sizes: Sizes, dim: int) -> list[Tensor]:
        pieces = super().cut(leaf, sizes, dim)
        if dim == 0:
            samples = sys.modules["monai.data"].decollate_batch(leaf.detach(), detach=False)
            for piece, its_samples in zip(pieces, slices(samples, sizes), strict=True):
                self._record(piece, its_samples)
        return pieces

    def join(self, leaves: Sequence[Tensor], dim: int) -> Tensor:
        joined: Tensor = super().join(leaves, dim)
        if dim == 0:
            decollate = sys.modules["monai.data"].decollate_batch
            parts = [decollate(leaf.detach(), detach=False) for leaf in leaves]
            self._record(joined, [sample for part in parts for sample in part])
        return joined

    def _record(self, tensor: Tensor, samples: list[Tensor]) -> None:
        vars(tensor).update(vars(sys.modules["monai.data"].list_data_collate(samples)))


class _Arrays(Kind):
    """NumPy arrays; they stay on the host."""

    def size(self, leaf: Any, dim: int) -> int | None:
        return int(leaf.shape[dim]) if -leaf.ndim <= dim < leaf.ndim else None

    def cut(self, leaf: Any, sizes: Sizes, dim: int) -> list[Any]:
        return slices(leaf, sizes, dim % leaf.ndim)

    def join(self, leaves: Sequence[Any], dim: int) -> Any:
        return sys.modules["numpy"].concatenate(leaves, dim)

    def to(self, leaf: Any, device: torch.device) -> Any:
        return leaf


class _PackedSequences(Kind):
    """Packed sequences are samples in the order in which they were before packing."""

    def size(self, leaf: PackedSequence, dim: int) -> int | None:
        return int(leaf.batch_sizes[0])

    def cut(self, leaf: PackedSequence, sizes: Sizes, dim: int) -> list[PackedSequence]:
        sequences, in_order = unpack_sequence(leaf), leaf.sorted_indices is None
        parts = slices(sequences, sizes)
        return [pack_sequence(part, enforce_sorted=in_order) for part in parts]

    def join(self, leaves: Sequence[PackedSequence], dim: int) -> PackedSequence:
        sequences = [sequence for leaf in leaves for sequence in unpack_sequence(leaf)]
        lengths = [len(sequence) for sequence in sequences]
        were_in_order = all(leaf.sorted_indices is None for leaf in leaves)
        in_order = were_in_order and lengths == sorted(lengths, reverse=True)
        return pack_sequence(sequences, enforce_sorted=in_order)

    def to(self, leaf: PackedSequence, device: torch.device) -> PackedSequence:
        overlap = _may_overlap(device)
        return leaf.to(device, non_blocking=overlap)  # type: ignore[arg-type]  # torch types dtypes only


class _GraphBatches(Kind):
    """PyTorch Geometric's `Batch`, whose tensors count nodes and edges of all graphs."""

    def size(self, leaf: Any, dim: int) -> int | None:
        return int(leaf.num_graphs)

    def cut(self, leaf: Any, sizes: Sizes, dim: int) -> list[Any]:
        return [self._batch(leaf, part) for part in slices(leaf.to_data_list(), sizes)]

    def join(self, leaves: Sequence[Any], dim: int) -> Any:
        return self._batch(leaves[0], [graph for leaf in leaves for graph in leaf.to_data_list()])

    def _batch(self, leaf: Any, graphs: list[Any]) -> Any:
        # The leaf's own class is made at run time, of Batch and of the class of the graphs.
        maker: Any = next(base for base in type(leaf).__mro__ if "from_data_list" in vars(base))
        # For these keys it says which graph owns a row.
        keys = set(leaf.keys() if callable(leaf.keys) else leaf.keys)
        followed = sorted(k for k in keys if {f"{k}_batch", f"{k}_ptr"} <= keys)
        options = {"follow_batch": followed} if followed else {}
        return maker.from_data_list(graphs, **options)


class _TensorDicts(Kind):
    def size(self, leaf: Any, dim: int) -> int | None:
        shape = leaf.batch_size
        return int(shape[dim]) if -len(shape) <= dim < len(shape) else None

    def cut(self, leaf: Any, sizes: Sizes, dim: int) -> list[Any]:
        return slices(leaf, sizes, dim % len(leaf.batch_size))


class _Sliceables(Kind):
    """Objects of people's own with `to`, a length and slices."""

    def join(self, leaves: Sequence[Any], dim: int) -> Any:
        cat = getattr(type(leaves[0]), "cat", None)
        return cat(list(leaves)) if callable(cat) else list(leaves)


# What most nodes of most batches are: there is no need to ask these what they can do.
_PLAIN = frozenset({str, int, float, bool, type(None), bytes, list, tuple, dict})
TENSORS, _ARRAYS, _SLICEABLES = _Tensors(), _Arrays(), _Sliceables()
_META_TENSORS = _MetaTensors()
_PACKED, _GRAPHS, _TENSOR_DICTS = _PackedSequences(), _GraphBatches(), _TensorDicts()


def kind_of(node: Any) -> Kind | None:
    """The kind of a leaf with samples in it; None for containers and for all other leaves.

    Example:
        >>> kind_of(torch.zeros(8, 3)).size(torch.zeros(8, 3), 1), kind_of("text"), kind_of([1])
        (3, None, None)
    """
    if type(node) in _PLAIN:
        return None
    if isinstance(node, Tensor):
        return _META_TENSORS if type(node) is not Tensor and _is_meta_tensor(node) else TENSORS
    if isinstance(node, PackedSequence):
        return _PACKED
    if is_array(node):
        return _ARRAYS if node.ndim else None
    return _kind_by_abilities(node) if is_movable(node) else None


def size_of(node: Any, dim: int) -> int | None:
    """The number of samples in a node that is a leaf and has any along `dim`."""
    kind = kind_of(node)
    return None if kind is None else kind.size(node, dim)


def is_array(node: Any) -> bool:
    """Whether a node is an array or a scalar of NumPy, which the engine does not import."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(node, numpy.ndarray | numpy.generic)


def is_movable(node: Any) -> bool:
    """Whether a node is no tensor but an object that knows how to go to a device."""
    if type(node) in _PLAIN:
        return False
    return callable(getattr(type(node), "to", None)) and not isinstance(node, Tensor | nn.Module)


def move(leaf: Any, device: torch.device) -> Any:
    """A leaf on a device, as the same object if it is there or has nothing to move."""
    kind = kind_of(leaf)
    if kind is not None:
        return kind.to(leaf, device)
    return Kind().to(leaf, device) if is_movable(leaf) else leaf


def pick(leaf: Any, samples: Sequence[int], dim: int) -> Any:
    """Some samples of a leaf that has any, in the order in which they are named.

    Raises:
        CannotCut: the leaf's kind cannot be put together from single samples.

    Example:
        >>> pick(torch.tensor([10, 11, 12]), [2, 0], 0)
        tensor([12, 10])
    """
    kind = kind_of(leaf)
    if kind is None:
        raise CannotCut("with samples in it")
    if kind is TENSORS and leaf.layout is torch.strided and not leaf.is_nested:
        return leaf.index_select(dim, torch.tensor(samples).to(leaf.device, non_blocking=True))
    singles = kind.cut(leaf, (1,) * (kind.size(leaf, dim) or 0), dim)
    picked = kind.join([singles[i] for i in samples], dim)
    if isinstance(picked, list):
        raise CannotCut("of a class with a method cat, to be put in another order")
    return picked


def _kind_by_abilities(node: Any) -> Kind | None:
    if all(hasattr(node, name) for name in ("to_data_list", "from_data_list", "num_graphs")):
        return _GRAPHS
    cls = type(node)
    if hasattr(cls, "__torch_function__") and isinstance(getattr(node, "batch_size", None), tuple):
        # One without batch dimensions is an ordinary container.
        return _TENSOR_DICTS if node.batch_size else None
    has_slices = hasattr(cls, "__len__") and hasattr(cls, "__getitem__")
    is_known = hasattr(cls, "__dataclass_fields__") or isinstance(node, list | tuple)
    return _SLICEABLES if has_slices and not is_known and not hasattr(cls, "keys") else None


def _is_meta_tensor(node: Tensor) -> bool:
    """Whether a tensor of a class of its own has a record for each of its rows."""
    if not getattr(node, "is_batch", False) or "monai.data" not in sys.modules:
        return False
    records = getattr(node, "applied_operations", None)
    return isinstance(records, list) and node.dim() > 0 and len(records) == len(node)


def _may_overlap(device: torch.device) -> bool:
    """Whether a copy may still be under way when the call returns: never towards the host.

    Whoever reads host memory does not wait for the device; work on an accelerator does.
    """
    return device.type != "cpu"


def _ranges(sizes: Sizes) -> list[tuple[int, int]]:
    stops = list(accumulate(sizes))
    return list(zip([0, *stops], stops, strict=False))


def slices(leaf: Any, sizes: Sizes, dim: int = 0) -> list[Any]:
    """Consecutive pieces of what can be sliced, along a dim."""
    pieces = [slice(start, stop) for start, stop in _ranges(sizes)]
    before = (slice(None),) * dim
    return [leaf[(*before, piece) if dim else piece] for piece in pieces]
