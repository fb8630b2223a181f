"""Scatter: one batch becomes one shard per device, cut by the same sizes everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from torch import Tensor, nn

from lightning_dp.parallel.batch import tree
from lightning_dp.parallel.batch.leaves import CannotCut, Kind, kind_of, pick
from lightning_dp.parallel.batch.sizes import (
    WAY_OUT,
    BatchSizeError,
    Inferred,
    Reading,
    holds_samples,
    infer_batch_size,
)
from lightning_dp.parallel.batch.to_device import to_device
from lightning_dp.parallel.devices import DeviceLike, resolve_devices
from lightning_dp.parallel.split import Order, Sizes, even

__all__ = ["BatchSizeError", "cut", "cut_for", "scatter"]


def scatter(
    batch: Any,
    devices: Sequence[DeviceLike],
    sizes: Sequence[int] | None = None,
    dim: int = 0,
) -> list[Any]:
    """Cuts a batch into shards and moves each to its device.

    Tensors with the batch's size along `dim`, and lists and tuples with one item per sample, are
    cut; everything else goes to every replica. Tensors are cut as views and copied only where the
    device differs; from pinned memory the copies are asynchronous. Differentiable.

    Containers are dicts and other mappings, lists, tuples, named tuples and dataclasses. Packed
    sequences, NumPy arrays, PyTorch Geometric's batches, TensorDicts, and objects with `to`, a
    length and slices are cut in their own way.

    Args:
        batch: nested containers of tensors and other leaves.
        devices: one device per shard, as `torch.device`, name or id.
        sizes: samples per device, summing to the batch size, zeros allowed; None for an even
            split.
        dim: the dimension to cut.

    Returns:
        One shard per device, of the batch's structure; None where the size is 0.

    Raises:
        BatchSizeError: the batch has no size or two of them, or `sizes` sum to another one.
        TypeError: there is an object in the batch that has its own `to` but cannot be cut.
        ValueError: there is no such device, or not one size per device.

    Example:
        >>> import torch
        >>> scatter({"x": torch.arange(5), "scale": 2.0}, ["cpu", "cpu"])
        [{'x': tensor([0, 1, 2]), 'scale': 2.0}, {'x': tensor([3, 4]), 'scale': 2.0}]
    """
    places = resolve_devices(devices)
    n, reading = infer_batch_size(batch, dim)
    if n is None:
        raise BatchSizeError(
            f"Expected a batch with a tensor or a list to cut, got {type(batch).__qualname__}: "
            f"{batch!r:.200}. Yield tensors whose first dimension counts the samples. {WAY_OUT}"
        )
    sizes = even(n, len(places)) if sizes is None else tuple(sizes)
    if len(sizes) != len(places):
        raise ValueError(
            f"sizes: expected {len(places)} numbers, one per device, got {len(sizes)}: {sizes}. "
            "Give every device a size (0 leaves it idle)."
        )
    shards = _cut_as(batch, Inferred(n, reading), sizes, dim)
    return [
        to_device(shard, device) if size else None
        for shard, device, size in zip(shards, places, sizes, strict=True)
    ]


def cut(batch: Any, sizes: Sizes, dim: int = 0, order: Order | None = None) -> list[Any]:
    """Cuts a batch as `scatter` does, without moving anything, and in any order of the samples.

    Example:
        >>> import torch
        >>> cut([torch.arange(3), ["a", "b", "c"]], (2, 0, 1))
        [[tensor([0, 1]), ['a', 'b']], None, [tensor([2]), ['c']]]
    """
    return _cut_as(batch, infer_batch_size(batch, dim), tuple(sizes), dim, order)


def _cut_as(
    batch: Any, inferred: Inferred, sizes: Sizes, dim: int, order: Order | None = None
) -> list[Any]:
    n, reading = inferred
    wrong = [size for size in sizes if size < 0]
    if wrong or (n is not None and n != sum(sizes)):
        raise BatchSizeError(
            f"Expected sizes of at least 0 that sum to the batch size {n}, got {tuple(sizes)} with "
            f"sum {sum(sizes)}. Let them sum to {n}."
        )
    active = tuple(size for size in sizes if size)
    positions = None if order is None else [part for part in order if part]
    shards = iter(_Cut(active, reading, dim, positions).node(batch, ()))
    return [next(shards) if size else None for size in sizes]


class _Cut:
    """Cuts the nodes of one batch by the same sizes, none of which is 0."""

    def __init__(self, sizes: Sizes, reading: Reading, dim: int, order: Order | None) -> None:
        self.sizes = sizes
        self.order = order
        self.reading = reading
        self.dim = dim
        self.n = sum(sizes)

    def node(self, node: Any, path: tree.Path) -> list[Any]:
        """One node per size."""
        kind = kind_of(node)
        if kind is not None:
            return self._leaf(node, kind, path)
        if self._is_list_of_samples(node, path):
            return self._list(node)
        pairs = tree.children(node)
        if pairs is None:
            return [_replicated(node, path)] * len(self.sizes)
        columns = [self.node(child, (*path, key)) for key, child in pairs]
        if not columns:
            return [node] * len(self.sizes)
        return [tree.rebuild(node, values) for values in zip(*columns, strict=True)]

    def _is_list_of_samples(self, node: Any, path: tree.Path) -> bool:
        has_length = tree.is_list(node) and len(node) == self.n
        return has_length and holds_samples(node, self.reading, self.dim, path)

    def _leaf(self, leaf: Any, kind: Kind, path: tree.Path) -> list[Any]:
        if kind.size(leaf, self.dim) != self.n:
            return [leaf] * len(self.sizes)
        try:
            if self.order is not None:
                return [pick(leaf, positions, self.dim) for positions in self.order]
            return kind.cut(leaf, self.sizes, self.dim)
        except CannotCut as error:
            got = type(leaf).__qualname__
            if isinstance(leaf, Tensor):
                got = f"layout {leaf.layout}{', nested' * leaf.is_nested}"
            raise TypeError(
                f"Expected a leaf {error}, got {tree.name(path)} of {got}. "
                f"Change it in the collate function. {WAY_OUT}"
            ) from None

    def _list(self, node: Sequence[Any]) -> list[Any]:
        ends = list(accumulate(self.sizes))
        consecutive = [range(end - n, end) for end, n in zip(ends, self.sizes, strict=True)]
        return [
            type(node)([node[i] for i in positions])  # type: ignore[call-arg]  # a list or a tuple
            for positions in self.order or consecutive
        ]


def _replicated(leaf: Any, path: tree.Path) -> Any:
    """A leaf that every replica gets whole, unless it may hold samples that we cannot see."""
    if callable(getattr(leaf, "to", None)):
        raise TypeError(
            f"Expected tensors in mappings, lists, tuples, named tuples or dataclasses, or objects "
            f"with to(), a length and slices, got {tree.name(path)} of type "
            f"{type(leaf).__qualname__}, which cannot be cut. "
            f"Turn it into one of those in the collate function. {WAY_OUT}"
        )
    return leaf


def cut_for(
    module: nn.Module,
    batch: Any,
    inferred: Inferred,
    sizes: Sizes,
    dim: int = 0,
    order: Order | None = None,
) -> list[Any]:
    """Cuts a batch as the module does it, by a method `split_batch(batch, sizes)`, or as `cut`.

    Args:
        module: the module.
        batch: the batch; one without a batch size goes to every shard whole.
        inferred: how it was read, see `infer_for`.
        sizes: samples per shard, summing to the batch size; where it is 0, there is no shard.
        dim: the dimension to cut.
        order: the positions of each shard's samples in the batch; None for the batch's own order.

    Raises:
        ValueError: the module returned another number of shards.
    """
    own = getattr(module, "split_batch", None)
    if own is None:
        return _cut_as(batch, inferred, sizes, dim, order)
    parts = list(own(batch, sizes))
    if len(parts) != len(sizes):
        raise ValueError(
            f"{type(module).__qualname__}.split_batch: expected one shard for each of "
            f"the sizes {sizes}, got {len(parts)} shards. Return a list as long as sizes; "
            "where a size is 0, the entry is not used."
        )
    return parts
