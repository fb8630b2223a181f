"""Reads a batch: how many samples it has, and which of its lists hold one item per sample.

1. **Columns**: all tensors have one size along `dim`. Lists are containers of columns, as PyTorch's
   `default_collate` makes them; lists of names or numbers of that length are columns, too.
2. **Lists of samples**, as in detection: the outermost lists below the top, with alike items, have
   one length, and tensors beside them that size. Such a list has one item per sample. Tensors of
   one length in a list are columns unless another list says how many samples there are.
3. **A list of samples**: the batch is a list of alike tuples, mappings or objects.

The first that holds is the reading, with two exceptions. Lists of mappings or objects, and lists
whose length a list of names or numbers confirms, hold samples even where all tensors agree. And a
batch that is a list whose items have a number each, a label, is a list of samples. Leaves of size 1
go to every replica where all others agree. A list of lists that are no columns is refused: it may
hold samples, or batches of several loaders. A module's `batch_size(batch)` decides the number; of
the readings above the first with that number is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """A leaf with rows or a list: where it is, its length, and its items if it is a list."""

    path: tree.Path
    size: int
    items: Sequence[Any] = ()


def infer_for(module: nn.Module, batch: Any, dim: int = 0, *, columns: bool = False) -> Inferred:
    """How a module's batch is read: by its method `batch_size(batch)`, else by what is in it."""
    if callable(getattr(module, "batch_size", None)):
        return _as_module_says(module, batch, dim, columns=columns)
    # Most batches are a tensor, or a flat container of nothing but tensors of one size.
    kind = type(batch)
    parts = [*batch.values()] if kind is dict else batch if kind in (list, tuple) else [batch]
    if {*map(type, parts)} == {Tensor}:
        sizes = {size_of(part, dim) for part in parts}
        if len(sizes) == 1 and None not in sizes:
            return Inferred(sizes.pop(), "columns")
    return infer_batch_size(batch, dim, columns=columns)


def infer_batch_size(
    batch: Any, dim: int, *, columns: bool = False, size: int | None = None
) -> Inferred:
    """How a batch is read by what is in it, as one of `size` samples if that is known.

    With `columns`, as for the arguments of a call, tensors that all have one size are columns
    whatever lists they are in; a list has one item per sample only beside a tensor that says so.

    Example:
        >>> import torch
        >>> boxes = [torch.zeros(n, 4) for n in (5, 0, 2)]
        >>> tuple(infer_batch_size([torch.zeros(3, 8), torch.zeros(3)], 0))
        (3, 'columns')
        >>> tuple(infer_batch_size({"boxes": boxes}, 0))
        (3, 'lists')
    """
    rows = _parts(batch, dim)
    n = _agreed(rows, size)
    if columns and n is not None:
        return Inferred(n, "columns")
    names = {part.size for part in _parts(batch, dim, _holds_names) if part.items}
    entries = _entries(batch, dim, size, names)
    lists = [entry for entry in entries if entry.items]
    if columns and len(lists) == len(entries):
        return Inferred(size or _agreed_or_raise(batch, dim, rows), "columns")
    by_lists = _agreed(lists if size is not None else entries, size) if lists else None
    samples = len(batch) if _is_list_of_samples(batch) and size in (None, len(batch)) else None
    if n is not None and samples is not None and all(map(_has_number, batch)):
        return Inferred(samples, "samples")
    if n is not None and (by_lists is None or not _hold_samples(lists, by_lists, n, names)):
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
    if lists and size is None and _agreed(_large(rows)) is None:
        by_lists = _agreed(_large(entries))
        if by_lists is not None:
            return Inferred(by_lists, "lists")
    return Inferred(size or _agreed_or_raise(batch, dim, rows or entries), "columns")


def _as_module_says(module: Any, batch: Any, dim: int, *, columns: bool) -> Inferred:
    """How a batch is read of which the module's method `batch_size(batch)` says the size."""
    size, name = module.batch_size(batch), f"{type(module).__qualname__}.batch_size"
    if type(size) is not int or size < 0:
        raise BatchSizeError(
            f"{name}: expected the number of samples as an int of at least 0, got {size!r:.80}. "
            "Return how many samples the batch has."
        )
    if hasattr(module, "split_batch"):
        return Inferred(size, "columns")
    ways = (None, _may_hold_samples, _holds_names)
    found = {part.size for is_whole in ways for part in _parts(batch, dim, is_whole)}
    if size > 1 and size not in found:
        raise BatchSizeError(
            f"{name}: expected the length of something in the batch along dim {dim} "
            f"{tuple(sorted(found))}, got {size}. Return that number. {WAY_OUT}"
        )
    return infer_batch_size(batch, dim, columns=columns, size=size)


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


def _parts(
    node: Any, dim: int, is_whole: Callable[[Any], bool] | None = None, path: tree.Path = ()
) -> list[_Part]:
    """The leaves with rows, and the outermost lists that are taken as a whole."""
    if is_whole is not None and tree.is_list(node) and is_whole(node):
        return [_Part(path, len(node), node)]
    pairs = tree.children(node)
    if pairs is None:
        size = size_of(node, dim)
        return [] if size is None else [_Part(path, size)]
    return [part for key, child in pairs for part in _parts(child, dim, is_whole, (*path, key))]


def _entries(batch: Any, dim: int, size: int | None, names: set[int]) -> list[_Part]:
    """Lists of samples below the top, and leaves with rows outside of them."""

    def entries(is_whole: Callable[[Any], bool], length: int | None) -> list[_Part]:
        return _parts(
            batch,
            dim,
            lambda node: (
                node is not batch
                and length in (None, len(node))
                and _may_hold_samples(node)
                and is_whole(node)
            ),
        )

    outside = {part.size for part in entries(lambda _: True, None) if not part.items}

    def are_columns(node: Any) -> bool:
        if len(node) == 1 and outside == {1}:  # a batch of one sample, such as [image], [label]
            return False
        rows = {size_of(item, dim) for item in node}
        return all(map(_is_tensor, node)) and len(rows) == 1 and rows.isdisjoint({None, 1})

    parts = entries(lambda node: not are_columns(node), size)
    known = {part.size for part in parts if part.items} | names | {size} - {None}

    def is_whole(node: Any) -> bool:
        return len(node) in known or not are_columns(node)

    found = entries(is_whole, size)
    columns = _agreed([entry for entry in found if not entry.items])
    if size is None and columns is not None and _agreed(found) is None:
        return entries(is_whole, columns)  # only lists as long as these
    return found


def _hold_samples(lists: Sequence[_Part], by_lists: int, n: int, names: set[int]) -> bool:
    """Whether lists hold samples although all tensors have n rows."""
    items = [item for entry in lists for item in entry.items if item is not None]
    if not all(_is_tensor(item) or tree.is_list(item) for item in items):
        return True
    return by_lists in names and n not in names


def _agreed(found: Sequence[_Part], size: int | None = None) -> int | None:
    """The size that all have, None if there are several; only `size`, if that is known."""
    sizes = {part.size for part in found}
    return sizes.pop() if len(sizes) == 1 and size in (None, *sizes) else None


def _large(found: Sequence[_Part]) -> Sequence[_Part]:
    return [part for part in found if part.size != 1]


def _agreed_or_raise(batch: Any, dim: int, found: Sequence[_Part]) -> int | None:
    """The one size beside sizes of 1, of leaves with rows or else of names; None without any."""
    found = found or [part for part in _parts(batch, dim, _holds_names) if part.items]
    found = _large(found) or found
    for other in found:
        if other.size != found[0].size:
            raise BatchSizeError(
                f"Expected one batch size along dim {dim}, got two: {tree.name(found[0].path)} has "
                f"{found[0].size} and {tree.name(other.path)} has {other.size}. Give both the same "
                "number of samples, or pass what is not cut as a number, a 0-dim tensor or with a "
                f"length of 1; give tensors of one sample each as a list in a dict. {WAY_OUT}"
            )
    return found[0].size if found else None


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
