"""Counts a batch, cuts it into shards, and moves these to their devices.

Most batches are flat: one tensor, or a dict, list or tuple of nothing but tensors of one length.
They are counted and cut here; `batch_size` and `tree` know all others.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from lightning_dp.parallel.comm import to_device_coalesced
from lightning_dp.parallel.devices import DeviceLike, resolve_devices
from lightning_dp.parallel.errors import noted
from lightning_dp.parallel.scatter import tree
from lightning_dp.parallel.scatter.batch_size import (
    WAY_OUT,
    BatchSizeError,
    Inferred,
    Kind,
    holds_samples,
    infer_batch_size,
    read_as_module_says,
)
from lightning_dp.parallel.scatter.tree import LeafType, leaf_type, move, size_of
from lightning_dp.parallel.split import Sizes, even

Override: TypeAlias = (
    Literal["mean", "sum", "stack", "cat", "first", "list"] | Callable[[list[Any]], Any]
)
"""How outputs are joined: by name, or by a function of the list of the replicas' values."""


@dataclass
class RowRules:
    """The options of gathering: for outputs, and for what a step leaves on self.

    Attributes:
        dim: the dimension along which batches are cut.
        overrides: how outputs are joined, by key or dotted path, see `gather`.
    """

    dim: int = 0
    overrides: Mapping[str, Override] = field(default_factory=dict)
    _warned: set[tuple[Any, ...]] = field(default_factory=set)

    def warn_once(self, path: tuple[Any, ...], text: str) -> None:
        """Warns, once for each path."""
        if path not in self._warned:
            self._warned.add(path)
            warnings.warn(text, stacklevel=2)


@dataclass(frozen=True)
class Shards:
    """A batch after split and scatter.

    Attributes:
        sizes: the sample count per device, zeros allowed.
        parts: the shard per device, None where the size is 0.
        whole: whether nothing was cut and the root has the batch as it is.
        row_rules: how results are joined.
    """

    sizes: Sizes
    parts: list[Any] = field(repr=False)
    whole: bool = False
    row_rules: RowRules = field(default_factory=RowRules, repr=False, compare=False)

    @cached_property
    def active(self) -> list[int]:
        """The replicas that have samples."""
        return [k for k, size in enumerate(self.sizes) if size]

    @cached_property
    def active_sizes(self) -> list[int]:
        """The sizes of the shards of the active replicas."""
        return [size for size in self.sizes if size]

    def place(self, stage: str, k: int) -> str:
        """Completes the sentence "in replica 2 on cuda:1, ..." in an error."""
        start = sum(self.sizes[:k])
        last = start + self.sizes[k] - 1
        return f", {stage}, samples {start} to {last} of {sum(self.sizes)}"


# --- Counting


def infer_for(
    module: nn.Module, batch: Any, dim: int = 0, *, is_call_arguments: bool = False
) -> Inferred:
    """How a module's batch is read: by its method `batch_size(batch)`, else by its contents."""
    if callable(getattr(module, "batch_size", None)):
        return read_as_module_says(module, batch, dim, is_call_arguments=is_call_arguments)
    sizes: set[int] = set()
    for part in _parts(batch):
        is_plain = type(part) is Tensor and part.layout is torch.strided and not part.is_nested
        if not is_plain or part.requires_grad or not -part.dim() <= dim < part.dim():
            break
        if forward_ad.unpack_dual(part).tangent is not None:
            break
        sizes.add(part.shape[dim])
    else:
        if len(sizes) == 1:
            return Inferred(sizes.pop(), "flat")
    return infer_batch_size(batch, dim, is_call_arguments=is_call_arguments)


def _parts(batch: Any) -> Collection[Any]:
    """The entries of a plain container, or else the batch alone."""
    kind = type(batch)
    return batch.values() if kind is dict else batch if kind in (list, tuple) else [batch]


def warn_of_nothing_to_cut(dim: int) -> None:
    """Warns that a step's batch has no size, so that one device alone gets it."""
    warnings.warn(
        "The batch has no tensor and no list that could be cut: it runs on the root device alone. "
        f"Yield tensors whose dim {dim} counts the samples.",
        stacklevel=2,
    )


# --- Cutting


def cut_for(
    module: nn.Module, batch: Any, inferred: Inferred, sizes: Sizes, dim: int = 0
) -> list[Any]:
    """Cuts a batch by the module's method `split_batch(batch, sizes)`, or else as `cut` does."""
    split_batch = getattr(module, "split_batch", None)
    if split_batch is None:
        return cut(batch, sizes, dim, inferred)
    with noted(f"[cutting the batch, {type(module).__qualname__}.split_batch]"):
        parts = list(split_batch(batch, sizes))
    if len(parts) != len(sizes):
        raise ValueError(
            f"{type(module).__qualname__}.split_batch: expected one shard for each of "
            f"the sizes {sizes}, got {len(parts)} shards. Return a list as long as sizes; "
            "where a size is 0, the entry is not used."
        )
    return parts


def cut(batch: Any, sizes: Sizes, dim: int = 0, inferred: Inferred | None = None) -> list[Any]:
    """Cuts a batch as `scatter` does, without moving anything.

    Example:
        >>> cut([torch.arange(3), ["a", "b", "c"]], (2, 0, 1))
        [[tensor([0, 1]), ['a', 'b']], None, [tensor([2]), ['c']]]
    """
    n, reading = inferred or infer_batch_size(batch, dim)
    if min(sizes) < 0 or n not in (None, sum(sizes)):
        raise BatchSizeError(
            f"Expected sizes of at least 0 that sum to the batch size {n}, got {tuple(sizes)} with "
            f"sum {sum(sizes)}. Let them sum to {n}."
        )
    active = tuple(size for size in sizes if size)
    if reading == "flat":
        shards = iter(_cut_flat(batch, active, dim))
    else:
        shards = iter(_Cut(active, sum(sizes), dim, reading).node(batch, ()))
    return [next(shards) if size else None for size in sizes]


def _cut_flat(batch: Any, sizes: Sizes, dim: int) -> list[Any]:
    # `.data`: each piece has a version counter of its own, see `tree`.
    columns = [[p.data for p in column.split(sizes, dim)] for column in _parts(batch)]
    kind = type(batch)
    if kind is dict:
        return [dict(zip(batch, shard, strict=True)) for shard in zip(*columns, strict=True)]
    return [kind(s) for s in zip(*columns, strict=True)] if kind in (list, tuple) else columns[0]


class _Cut(NamedTuple):
    """Cuts the nodes of one batch by the same sizes, none of which is 0."""

    sizes: Sizes
    total: int
    dim: int
    reading: Kind

    def node(self, node: Any, path: tree.Path) -> list[Any]:
        """One node per size."""
        kind = leaf_type(node)
        if kind is not None:
            return self._leaf(node, kind, path)
        has_length = tree.is_list(node) and len(node) == self.total
        if has_length and holds_samples(node, self.reading, self.dim, path):
            return [tree.of_list(node, part) for part in tree.slices(node, self.sizes)]
        pairs = tree.children(node)
        if pairs is None:
            _check_replicated(node, path, self.total, self.dim)
        if not pairs:
            return [node] * len(self.sizes)
        columns = [self.node(child, (*path, key)) for key, child in pairs]
        return [tree.rebuild(node, values) for values in zip(*columns, strict=True)]

    def _leaf(self, leaf: Any, kind: LeafType, path: tree.Path) -> list[Any]:
        if kind.size(leaf, self.dim) != self.total:
            return [leaf] * len(self.sizes)
        if isinstance(leaf, Tensor) and (leaf.is_nested or leaf.layout is not torch.strided):
            raise TypeError(
                f"Expected tensors of strided layout, got {tree.name(path)} of layout {leaf.layout}"
                f"{', nested' * leaf.is_nested}. Change it in the collate function. {WAY_OUT}"
            )
        return kind.cut(leaf, self.sizes, self.dim)


def _check_replicated(leaf: Any, path: tree.Path, n: int, dim: int) -> None:
    """Raises an error about an object that has samples, or may have some that we cannot see."""
    attributes = {} if isinstance(leaf, type) else getattr(leaf, "__dict__", {})
    rows = [name for name, value in attributes.items() if size_of(value, dim) == n > 1]
    if not rows and not callable(getattr(leaf, "to", None)):
        return
    reason = "which has a method to() and may hold samples"
    if rows:
        reason = f"whose {', '.join(rows)} has as many rows as the batch has samples, {n}"
    raise TypeError(
        "Expected tensors in mappings, lists, tuples, named tuples or dataclasses, got "
        f"{tree.name(path)} of type {type(leaf).__qualname__}, {reason}: all of it would go to "
        f"every replica. Turn it into one of those in the collate function. {WAY_OUT}"
    )


def scatter(
    batch: Any,
    devices: Sequence[DeviceLike],
    sizes: Sequence[int] | int | None = None,
    dim: int = 0,
) -> list[Any]:
    """Cuts a batch into shards and moves each to its device.

    Tensors with the batch's size along `dim`, and lists and tuples with one item per sample, are
    cut; everything else goes to every replica. Tensors are cut as views and copied only where the
    device differs; from pinned memory the copies are asynchronous. Differentiable.

    Containers and leaves are those of `scatter.tree`; how a batch is read, `batch_size` says.

    Args:
        batch: nested containers of tensors and other leaves.
        devices: one device per shard, as `torch.device`, name or id.
        sizes: samples per device, summing to the batch size, zeros allowed; None for an even
            split. An integer is `dim`, which comes third in `torch.nn.parallel.scatter`.
        dim: the dimension to cut.

    Returns:
        One shard per device, of the batch's structure; None where the size is 0.

    Raises:
        BatchSizeError: the batch has no size or two of them, or `sizes` sum to another one.
        TypeError: there is an object in the batch that has its own `to`, or tensors with the
            batch's size, and cannot be cut.
        ValueError: there is no such device, or not one size per device.

    Example:
        >>> scatter({"x": torch.arange(5), "scale": 2.0}, ["cpu", "cpu"])
        [{'x': tensor([0, 1, 2]), 'scale': 2.0}, {'x': tensor([3, 4]), 'scale': 2.0}]
    """
    places = resolve_devices(devices)
    if isinstance(sizes, int):
        dim, sizes = sizes, None
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
    shards = zip(cut(batch, sizes, dim, inferred), places, sizes, strict=True)
    return [to_device(shard, device) if size else None for shard, device, size in shards]


# --- Moving


def to_device(node: Any, device: torch.device) -> Any:
    """Moves the tensors of a tree; those already on `device` stay the same objects.

    Objects that know how to go to a device (graphs, TensorDicts, packed sequences) are moved as
    copies. Copies to an accelerator are asynchronous where the source is pinned or on an
    accelerator; copies to the CPU are finished on return.

    Example:
        >>> to_device({"x": torch.zeros(2), "name": "a"}, torch.device("cpu"))
        {'x': tensor([0., 0.]), 'name': 'a'}
    """
    if type(node) is Tensor and node.device == device:
        return node
    return tree.map_leaves(lambda leaf: move(leaf, device), node)


def to_device_together(
    nodes: Sequence[Any], device: torch.device, *, later: Collection[torch.device] = ()
) -> list[Any]:
    """As `to_device` for several trees, but with few copies per source device and dtype.

    Differentiable. Copies to the CPU are finished on return, except those from devices in `later`:
    the caller synchronizes these before it reads the results.
    """
    leaves = [leaf for node in nodes for leaf in tree.leaves(node)]
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    all_moved = all(tensor.device == device for tensor in tensors)
    if all_moved and not any(map(tree.is_movable, leaves)):
        return list(nodes)
    arrived = iter(to_device_coalesced(tensors, device, later=later))

    def moved(leaf: Any) -> Any:
        return next(arrived) if isinstance(leaf, Tensor) else move(leaf, device)

    return [tree.map_leaves(moved, node) for node in nodes]


def weighted_mean(scalars: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The sum of w_i * x_i over the sum of w_i; tensors of one shape, on one device."""
    total = float(sum(weights))
    terms = [scalar * (weight / total) for scalar, weight in zip(scalars, weights, strict=True)]
    return terms[0] if len(terms) == 1 else torch.stack(terms).sum(0)
