"""Reads a batch: how many samples it has, and which of its lists hold one item per sample.

1. **Columns**: all tensors have one size along `dim`. Lists are containers of columns, as PyTorch's
   `default_collate` makes them; lists of names or numbers of that length are columns, too.
2. **Lists of samples**, as in detection: inside the batch there are lists of n items with equal
   structure, and every tensor outside of them has size n. Each of these lists has one item per
   sample. A list of tensors of equal size has columns, unless another list has as many items as it.
3. **A list of samples**: the batch is a list of alike tuples, mappings or objects.

The first that holds is the reading, with two exceptions. Lists of mappings or objects, and lists
whose length a list of names or numbers confirms, hold samples even where all tensors agree. And a
batch that is a list whose items have a number each, a label, is a list of samples. Leaves of size 1
go to every replica where all others agree. A list of lists that are no columns is refused: it may
hold samples, or batches of several loaders. A module's `batch_size(batch)` decides the number; of
the readings above the first with that number is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from lightning_dp.parallel.scatter import tree
from lightning_dp.parallel.scatter.leaves import is_array, is_movable, leaf_type, size_of

Kind: TypeAlias = Literal["columns", "lists", "samples"]

WAY_OUT = (
    "Or define batch_size(batch) on the module, which says how many samples there are, or "
    "split_batch(batch, sizes), which cuts the batch itself."
)


class BatchSizeError(ValueError):
    """The batch does not have exactly one size along the dimension that is cut."""


class Inferred(NamedTuple):
    """How many samples a batch has, None if there is nothing to cut, and how it was read."""

    size: int | None
    reading: Kind


class _Part(NamedTuple):
    """A leaf with rows, or a list with the leaves in it: where it is, and its length."""

    path: tree.Path
    size: int
    items: Sequence[Any] = ()
    rows: Sequence[_Part] = ()


class _Found(NamedTuple):
    """What is in a batch."""

    rows: list[_Part]  # all leaves with rows
    outside: list[_Part]  # those that are in none of the lists
    lists: list[_Part]  # the outermost lists below the top that may hold samples
    names: list[_Part]  # the outermost lists of names or numbers


def infer_for(
    module: nn.Module, batch: Any, dim: int = 0, *, is_call_arguments: bool = False
) -> Inferred:
    """How a module's batch is read: by its method `batch_size(batch)`, else by its contents."""
    if callable(getattr(module, "batch_size", None)):
        return _as_module_says(module, batch, dim, is_call_arguments=is_call_arguments)
    # Most batches are a tensor, or a flat container of nothing but tensors of one size.
    kind = type(batch)
    parts = [*batch.values()] if kind is dict else batch if kind in (list, tuple) else [batch]
    if {*map(type, parts)} == {Tensor}:
        sizes = {size_of(part, dim) for part in parts}
        if len(sizes) == 1 and None not in sizes:
            return Inferred(sizes.pop(), "columns")
    return infer_batch_size(batch, dim, is_call_arguments=is_call_arguments)


def infer_batch_size(
    batch: Any, dim: int, *, is_call_arguments: bool = False, size: int | None = None
) -> Inferred:
    """How a batch is read by its contents, as one of `size` samples if that is known.

    With `is_call_arguments`, tensors that all have one size are columns whatever lists they are
    in; a list has one item per sample only beside a tensor that says so.

    Example:
        >>> import torch
        >>> boxes = [torch.zeros(n, 4) for n in (5, 0, 2)]
        >>> tuple(infer_batch_size([torch.zeros(3, 8), torch.zeros(3)], 0))
        (3, 'columns')
        >>> tuple(infer_batch_size({"boxes": boxes}, 0))
        (3, 'lists')
    """
    found = _look(batch, dim, size)
    n = _agreed(found.rows, size)
    if is_call_arguments and n is not None:
        return Inferred(n, "columns")
    lists, beside = _lists_of_samples(found, dim, size)
    if size is None and (outer := _agreed(beside)) and _agreed([*lists, *beside]) is None:
        found = _look(batch, dim, outer)  # only lists as long as the tensors beside them
        lists, beside = _lists_of_samples(found, dim, size)
    if is_call_arguments and not beside:
        return Inferred(size or _agreed_or_raise(found, dim), "columns")
    by_lists = _agreed(lists if size is not None else [*lists, *beside], size) if lists else None
    samples = len(batch) if _is_list_of_samples(batch) and size in (None, len(batch)) else None
    if n is not None and samples is not None and all(map(_has_number, batch)):
        return Inferred(samples, "samples")
    if n is not None and (by_lists is None or not _hold_samples(lists, n, found.names)):
        return Inferred(n, "columns")
    if by_lists is not None and (samples is None or isinstance(batch, tuple)):
        return Inferred(by_lists, "lists")
    if samples is not None and any(type(item) is list for item in batch):
        raise BatchSizeError(
            f"Expected a batch that can be read in one way, got a list of {samples} lists: they "
            "may be samples, columns of samples, or batches of several loaders. Yield samples as "
            f"tuples in a list, and columns in a dict. {WAY_OUT}"
        )
    if samples is not None:
        return Inferred(samples, "samples")
    if lists and size is None and _agreed(_large(found.rows)) is None:
        by_lists = _agreed(_large([*lists, *beside]))
        if by_lists is not None:
            return Inferred(by_lists, "lists")
    return Inferred(size or _agreed_or_raise(found, dim), "columns")


def _as_module_says(module: Any, batch: Any, dim: int, *, is_call_arguments: bool) -> Inferred:
    """How a batch is read of which the module's method `batch_size(batch)` says the size."""
    size, name = module.batch_size(batch), f"{type(module).__qualname__}.batch_size"
    if type(size) is not int or size < 0:
        raise BatchSizeError(
            f"{name}: expected the number of samples as an int of at least 0, got {size!r:.80}. "
            "Return how many samples the batch has."
        )
    if hasattr(module, "split_batch"):
        return Inferred(size, "columns")
    found = _look(batch, dim)
    lengths = {part.size for parts in (found.rows, found.lists, found.names) for part in parts}
    lengths |= {len(batch)} if _is_list_of_samples(batch) else set()
    if size > 1 and size not in lengths:
        raise BatchSizeError(
            f"{name}: expected the length of something in the batch along dim {dim} "
            f"{tuple(sorted(lengths))}, got {size}. Return that number. {WAY_OUT}"
        )
    return infer_batch_size(batch, dim, is_call_arguments=is_call_arguments, size=size)


def holds_samples(node: Any, reading: Kind, dim: int, path: tree.Path) -> bool:
    """Whether a list or tuple of the batch's length has one item per sample."""
    if not _has_tensors(node):
        return _holds_names(node) and not isinstance(node, torch.Size)
    if not path:
        return reading == "samples"
    if _is_tuple_of_lists(node):
        return False
    if all(size_of(leaf, dim) != len(node) for leaf in tree.leaves(node)):
        return True
    return reading != "columns" and are_alike(node)


def are_alike(items: Sequence[Any]) -> bool:
    """Whether items have one structure, and their tensors one dtype and number of dims each.

    Items may be missing: None is like every other.
    """
    return len({_signature(item) for item in items if item is not None}) == 1


def _look(batch: Any, dim: int, length: int | None = None) -> _Found:
    """What is in a batch; lists of samples have this length if it is known."""
    found = _Found([], [], [], [])

    def visit(node: Any, path: tree.Path, rows: list[_Part], *, is_inside: bool) -> None:
        if tree.is_list(node) and not is_inside:
            if _holds_names(node):
                found.names.append(_Part(path, len(node)))
                return
            if path and length in (None, len(node)) and _may_hold_samples(node):
                rows, is_inside = [], True
                found.lists.append(_Part(path, len(node), node, rows))
        pairs = tree.children(node)
        for key, child in pairs or ():
            visit(child, (*path, key), rows, is_inside=is_inside)
        size = size_of(node, dim) if pairs is None else None
        if size is not None:
            found.rows.append(_Part(path, size))
            rows.append(_Part(path, size))

    visit(batch, (), found.outside, is_inside=False)
    return found


def _lists_of_samples(found: _Found, dim: int, size: int | None) -> tuple[list[_Part], list[_Part]]:
    """The lists that hold samples, and the leaves with rows beside them."""
    outside = {part.size for part in found.outside}

    def are_columns(part: _Part) -> bool:
        if part.size == 1 and outside == {1}:  # a batch of one sample, such as [image], [label]
            return False
        rows = {size_of(item, dim) for item in part.items}
        return all(map(_is_tensor, part.items)) and len(rows) == 1 and rows.isdisjoint({None, 1})

    known = {part.size for part in found.lists if not are_columns(part)}
    known |= {part.size for part in found.names} | (set() if size is None else {size})
    lists = [part for part in found.lists if part.size in known or not are_columns(part)]
    inside = [row for part in found.lists if part not in lists for row in part.rows]
    return lists, [*found.outside, *inside]


def _hold_samples(lists: Sequence[_Part], n: int, names: Sequence[_Part]) -> bool:
    """Whether lists hold samples although all tensors have n rows."""
    items = [item for part in lists for item in part.items if item is not None]
    if not all(_is_tensor(item) or tree.is_list(item) for item in items):
        return True
    lengths = {part.size for part in names}
    return lists[0].size in lengths and n not in lengths


def _agreed(found: Sequence[_Part], size: int | None = None) -> int | None:
    """The size that all have, None if there are several; only `size`, if that is known."""
    sizes = {part.size for part in found}
    return sizes.pop() if len(sizes) == 1 and size in (None, *sizes) else None


def _large(found: Sequence[_Part]) -> Sequence[_Part]:
    return [part for part in found if part.size != 1]


def _agreed_or_raise(found: _Found, dim: int) -> int | None:
    """The one size beside sizes of 1, of leaves with rows or else of names; None without any."""
    parts: Sequence[_Part] = found.rows or found.lists or found.names
    parts = _large(parts) or parts
    for other in parts:
        if other.size != parts[0].size:
            raise BatchSizeError(
                f"Expected one batch size along dim {dim}, got two: {tree.name(parts[0].path)} has "
                f"{parts[0].size} and {tree.name(other.path)} has {other.size}. Give both the same "
                "number of samples, or pass what is not cut as a number, a 0-dim tensor or with a "
                f"length of 1; give tensors of one sample each as a list in a dict. {WAY_OUT}"
            )
    return parts[0].size if parts else None


def _is_list_of_samples(batch: Any) -> bool:
    """Whether a batch is a list of alike samples, none of which is a bare tensor."""
    is_list = tree.is_list(batch) and not any(map(_is_tensor, batch))
    return is_list and _has_tensors(batch) and are_alike(batch)


def _may_hold_samples(node: Any) -> bool:
    return _has_tensors(node) and not _is_tuple_of_lists(node) and are_alike(node)


def _is_tuple_of_lists(node: Any) -> bool:
    return isinstance(node, tuple) and any(tree.is_list(item) for item in node)


def _holds_names(node: Any) -> bool:
    """Whether a list without tensors has one name, number or other value per sample.

    A list of tuples of equally many strings has not: these are columns, as `default_collate` makes
    them. Neither has a list of nothing but None, which an exhausted DataLoader leaves.
    """
    if _has_tensors(node):
        return False
    tables = [tree.is_list(x) and x and all(isinstance(s, str | bytes) for s in x) for x in node]
    is_table = all(tables) and len({len(item) for item in node}) == 1
    return not is_table and any(item is not None for item in node)


def _has_tensors(node: Any) -> bool:
    """Whether there are tensors in a node, 0-dim ones too, or objects that go to a device."""
    return any(leaf_type(leaf) is not None or is_movable(leaf) for leaf in tree.leaves(node))


def _has_number(item: Any) -> bool:
    """Whether an item has a number in it, beside other things: it is one sample."""
    entries = [child for _, child in tree.children(item) or ()]
    return any(x.ndim == 0 if _is_tensor(x) else type(x) in (int, float) for x in entries)


def _is_tensor(node: Any) -> bool:
    return isinstance(node, Tensor) or is_array(node)


def _signature(node: Any) -> Any:
    if _is_tensor(node):
        return node.dtype, node.ndim
    pairs = tree.children(node)
    if pairs is None:
        return type(node) if is_movable(node) else None
    if not tree.is_list(node):
        return type(node), tuple((key, _signature(child)) for key, child in pairs)
    signatures = [_signature(child) for _, child in pairs]
    return list, tuple(signatures[:1] if len(set(signatures)) == 1 else signatures)
