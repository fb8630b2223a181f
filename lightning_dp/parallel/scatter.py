"""Scatter: one batch becomes one shard per device, cut by the same sizes everywhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_dp.parallel import tree
from lightning_dp.parallel.split import Sizes, even
from lightning_dp.parallel.transfer import to_device


class BatchSizeError(ValueError):
    """The batch does not have exactly one size along the dimension that is cut."""


def batch_size(batch: Any, dim: int = 0) -> int | None:
    """The number of samples in a batch: the one length that its tensors have along `dim`.

    A length of 1 beside a larger one is not a second size (such a tensor goes to every replica),
    and neither are 0-dim tensors, numbers and strings. A batch without tensors has the length of
    its lists of strings, numbers and other leaves.

    Args:
        batch: nested mappings, lists, tuples, named tuples and dataclasses.
        dim: the dimension to cut.

    Returns:
        The batch size in samples, or None if nothing in the batch has one.

    Raises:
        BatchSizeError: two leaves have different sizes; both are named.

    Example:
        >>> batch_size({"x": torch.zeros(8, 3), "name": ["a"] * 8, "scale": 2.0})
        8
    """
    found = list(_tensor_sizes(batch, dim, ())) or list(_list_sizes(batch, ()))
    large = [pair for pair in found if pair[1] != 1]
    if not large:
        return 1 if found else None
    first_path, first = large[0]
    for path, size in large:
        if size != first:
            raise BatchSizeError(
                f"Expected one batch size along dim {dim}, got two: {tree.name(first_path)} has "
                f"{first} and {tree.name(path)} has {size}. Give both the same number of samples, "
                "or pass what is not cut as a number, a 0-dim tensor or with a length of 1."
            )
    return first


def scatter(
    batch: Any,
    devices: Sequence[torch.device],
    sizes: Sequence[int] | None = None,
    dim: int = 0,
) -> list[Any]:
    """Cuts a batch into shards and moves each to its device.

    Tensors with the batch's length along `dim`, and lists and tuples of that length without
    tensors in them, are cut; everything else goes to every replica. Tensors are cut as views and
    copied only where the device differs; from pinned memory the copies are asynchronous.

    Args:
        batch: nested mappings, lists, tuples, named tuples and dataclasses.
        devices: one device per shard.
        sizes: samples per device, summing to the batch size; None for an even split.
        dim: the dimension to cut.

    Returns:
        One shard per device, of the batch's structure.

    Raises:
        BatchSizeError: the batch has no size or two of them, or `sizes` sum to another one.

    Example:
        >>> cpu = torch.device("cpu")
        >>> scatter({"x": torch.arange(5), "scale": 2.0}, [cpu, cpu])
        [{'x': tensor([0, 1, 2]), 'scale': 2.0}, {'x': tensor([3, 4]), 'scale': 2.0}]
    """
    n = batch_size(batch, dim)
    if n is None:
        raise BatchSizeError(f"Expected a batch with a tensor or a list to cut, got {batch!r}.")
    sizes = even(n, len(devices)) if sizes is None else tuple(sizes)
    shards = cut(batch, tuple(sizes), dim)
    return [to_device(shard, device) for shard, device in zip(shards, devices, strict=True)]


def cut(batch: Any, sizes: Sizes, dim: int = 0) -> list[Any]:
    """Cuts a batch into one shard per size, without moving anything.

    Example:
        >>> cut([torch.arange(3), ["a", "b", "c"]], (2, 1))
        [[tensor([0, 1]), ['a', 'b']], [tensor([2]), ['c']]]
    """
    n = batch_size(batch, dim)
    if n is not None and n != sum(sizes):
        raise BatchSizeError(
            f"Expected sizes that sum to the batch size {n}, got {sizes} with sum {sum(sizes)}."
        )
    return _cut(batch, sizes, dim, ())


def _cut(node: Any, sizes: Sizes, dim: int, path: tree.Path) -> list[Any]:
    if isinstance(node, Tensor):
        return _cut_tensor(node, sizes, dim)
    if _is_sample_list(node) and len(node) == sum(sizes):
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        return [node[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    pairs = tree.children(node)
    if pairs is None:
        return [_replicated(node, path)] * len(sizes)
    columns = [_cut(child, sizes, dim, (*path, key)) for key, child in pairs]
    return [tree.rebuild(node, [column[i] for column in columns]) for i in range(len(sizes))]


def _cut_tensor(tensor: Tensor, sizes: Sizes, dim: int) -> list[Tensor]:
    if not _has_dim(tensor, dim) or tensor.size(dim) != sum(sizes):
        return [tensor] * len(sizes)
    return list(torch.split(tensor, list(sizes), dim))


def _replicated(leaf: Any, path: tree.Path) -> Any:
    """A leaf that every replica gets whole, unless it may hold samples that we cannot see."""
    if callable(getattr(leaf, "to", None)):
        raise TypeError(
            f"Expected tensors in mappings, lists, tuples, named tuples or dataclasses, got "
            f"{tree.name(path)} of type {type(leaf).__qualname__}, which cannot be cut. "
            "Turn it into one of those in the collate function."
        )
    return leaf


def _tensor_sizes(node: Any, dim: int, path: tree.Path) -> Iterator[tuple[tree.Path, int]]:
    if isinstance(node, Tensor):
        if _has_dim(node, dim):
            yield path, node.size(dim)
        return
    for key, child in tree.children(node) or ():
        yield from _tensor_sizes(child, dim, (*path, key))


def _list_sizes(node: Any, path: tree.Path) -> Iterator[tuple[tree.Path, int]]:
    if _is_sample_list(node) and not _is_table(node):
        yield path, len(node)
        return
    for key, child in tree.children(node) or ():
        yield from _list_sizes(child, (*path, key))


def _is_sample_list(node: Any) -> bool:
    """Whether a list or tuple may hold one item per sample: there is no tensor in it."""
    is_list = isinstance(node, list | tuple) and not hasattr(node, "_fields")
    return is_list and bool(node) and not any(_holds_tensor(item) for item in node)


def _is_table(node: list[Any] | tuple[Any, ...]) -> bool:
    """Lists of one length in a list: columns of a batch, as `default_collate` makes of strings."""
    lengths = {len(item) if isinstance(item, list | tuple) else None for item in node}
    return len(lengths) == 1 and None not in lengths


def _holds_tensor(node: Any) -> bool:
    if isinstance(node, Tensor):
        return True
    return any(_holds_tensor(child) for _, child in tree.children(node) or ())


def _has_dim(tensor: Tensor, dim: int) -> bool:
    return -tensor.dim() <= dim < tensor.dim()
