"""Scatter: one batch becomes one shard per device, cut by the same sizes everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from lightning_dp.parallel.batch import tree
from lightning_dp.parallel.batch.leaves import CannotCut, Kind, kind_of, pick, size_of, slices
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


def scatter(
    batch: Any,
    devices: Sequence[DeviceLike],
    sizes: Sequence[int] | int | None = None,
    dim: int | None = None,
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
            split. An integer is `dim`, which comes third in `torch.nn.parallel.scatter`.
        dim: the dimension to cut; None for 0.

    Returns:
        One shard per device, of the batch's structure; None where the size is 0.

    Raises:
        BatchSizeError: the batch has no size or two of them, or `sizes` sum to another one.
        TypeError: there is an object in the batch that has its own `to`, or tensors with the
            batch's size, and cannot be cut.
        ValueError: there is no such device, or not one size per device.

    Example:
        >>> import torch
        >>> scatter({"x": torch.arange(5), "scale": 2.0}, ["cpu", "cpu"])
        [{'x': tensor([0, 1, 2]), 'scale': 2.0}, {'x': tensor([3, 4]), 'scale': 2.0}]
    """
    places = resolve_devices(devices)
    sizes, dim = _sizes_and_dim(sizes, dim)
    inferred = infer_batch_size(batch, dim)
    if inferred.size is None:
        raise BatchSizeError(
            f"Expected a batch with a tensor or a list to cut, got {type(batch).__qualname__}: "
            f"{batch!r:.200}. Yield tensors whose first dimension counts the samples. {WAY_OUT}"
        )
    sizes = even(inferred.size, len(places)) if sizes is None else tuple(sizes)
    if len(sizes) != len(places):
        raise ValueError(
            f"sizes: expected {len(places)} numbers, one per device, got {len(sizes)}: {sizes}. "
            "Give every device a size (0 leaves it idle)."
        )
    shards = cut(batch, sizes, dim, inferred=inferred)
    return [
        to_device(shard, device) if size else None
        for shard, device, size in zip(shards, places, sizes, strict=True)
    ]


def _sizes_and_dim(
    sizes: Sequence[int] | int | None, dim: int | None
) -> tuple[Sequence[int] | None, int]:
    if not isinstance(sizes, int):
        return sizes, dim or 0
    if dim is not None:
        raise TypeError(
            f"scatter: expected dim once, got {sizes} in the place of sizes and dim={dim}. Give "
            "sizes as a list."
        )
    return None, sizes


def cut(
    batch: Any,
    sizes: Sizes,
    dim: int = 0,
    order: Order | None = None,
    inferred: Inferred | None = None,
) -> list[Any]:
    """Cuts a batch as `scatter` does, without moving anything, and in any order of the samples.

    Example:
        >>> import torch
        >>> cut([torch.arange(3), ["a", "b", "c"]], (2, 0, 1))
        [[tensor([0, 1]), ['a', 'b']], None, [tensor([2]), ['c']]]
    """
    n, reading = inferred or infer_batch_size(batch, dim)
    if min(sizes) < 0 or n not in (None, sum(sizes)):
        raise BatchSizeError(
            f"Expected sizes of at least 0 that sum to the batch size {n}, got {tuple(sizes)} with "
            f"sum {sum(sizes)}. Let them sum to {n}."
        )
    active = tuple(filter(None, sizes))
    positions = None if order is None else [part for part in order if part]
    shards = iter(_Cut(active, reading, dim, positions, sum(active)).node(batch, ()))
    return [next(shards) if size else None for size in sizes]


class _Cut(NamedTuple):
    """Cuts the nodes of one batch by the same sizes, none of which is 0 and whose sum is n."""

    sizes: Sizes
    reading: Reading
    dim: int
    order: Order | None
    n: int

    def node(self, node: Any, path: tree.Path) -> list[Any]:
        """One node per size."""
        kind = kind_of(node)
        if kind is not None:
            return self._leaf(node, kind, path)
        has_length = tree.is_list(node) and len(node) == self.n
        if has_length and holds_samples(node, self.reading, self.dim, path):
            return self._list(node)
        pairs = tree.children(node)
        if pairs is None:
            _check_replicated(node, path, self.n, self.dim)
        if not pairs:
            return [node] * len(self.sizes)
        columns = [self.node(child, (*path, key)) for key, child in pairs]
        return [tree.rebuild(node, values) for values in zip(*columns, strict=True)]

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

    def _list(self, node: Any) -> list[Any]:
        if self.order is None:
            return [type(node)(part) for part in slices(node, self.sizes)]
        return [type(node)([node[i] for i in positions]) for positions in self.order]


def _check_replicated(leaf: Any, path: tree.Path, n: int, dim: int) -> None:
    """Raises an error about a leaf that has samples, or may have some that we cannot see."""
    if callable(getattr(leaf, "to", None)):
        raise TypeError(
            f"Expected tensors in mappings, lists, tuples, named tuples or dataclasses, or objects "
            f"with to(), a length and slices, got {tree.name(path)} of type "
            f"{type(leaf).__qualname__}, which cannot be cut. "
            f"Turn it into one of those in the collate function. {WAY_OUT}"
        )
    attributes = {} if isinstance(leaf, type) else getattr(leaf, "__dict__", {})
    rows = [name for name, value in attributes.items() if size_of(value, dim) == n]
    if rows and n > 1:
        raise TypeError(
            f"Expected samples in mappings, lists, tuples, named tuples or dataclasses, got "
            f"{tree.name(path)} of type {type(leaf).__qualname__}, whose {', '.join(rows)} has as "
            f"many rows as the batch has samples, {n}: all of them would go to every replica. "
            f"Turn it into one of those in the collate function. {WAY_OUT}"
        )
