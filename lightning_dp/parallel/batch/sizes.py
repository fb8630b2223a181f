"""How a batch is read: what in it counts the samples, and what is cut into shards.

Tensors are columns of a batch, one row per sample; lists are containers of columns (as PyTorch's
`default_collate` makes them), or they hold one item per sample (as detection batches do). Nothing
in a batch says which, so the readings are tried in order, and the first under which everything
agrees on one size is taken:

1. **columns**: all tensors have one size along `dim`. Lists of names, labels and other leaves
   without such tensors are cut if they have that length.
2. **lists**: each outermost list or tuple below the top of the batch whose items are alike holds
   one item per sample (a tuple of lists does not: it is one of columns); tensors outside such
   lists are columns. If their sizes differ, only lists as long as these columns count.
3. **samples**: the batch itself is a list or tuple of samples, which are alike and no bare tensors.
   (A list of bare tensors is `[x, y]`.)
4. **columns**, then **lists**, where sizes of 1 do not count: such leaves go to every replica.
5. Without tensors: lists of names, labels and other leaves have one length.

Two readings that would cut a batch differently are an error, unless one is far more likely:

- 1 and 2, as in `{"pair": [a, b]}`: lists of names or numbers decide by their length; else lists
  of mappings or objects hold samples (targets of which each happens to have as many boxes), and so
  do lists of images (three dims, the first of which is 3); lists of one tensor hold a column, and
  so do lists of batches of images of one shape (four dims: the views of a batch), lists of up to
  three tensors with rows of different shapes (`[x, y]`), and lists beside other columns where
  both readings count the same.
- 1 and 3: a list of tuples, mappings or objects with a number each, `[(x, 1), (x, 0)]`, is one of
  samples with their labels; without, of columns: the batches of several DataLoaders.
- 2 and 3: `(list, list)` is a tuple of columns, `[(x, y), (x, y)]` a list of samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, NoReturn, TypeAlias

import torch
from torch import Tensor

from lightning_dp.parallel.batch import tree
from lightning_dp.parallel.batch.leaves import TENSORS, kind_of
from lightning_dp.parallel.batch.lists import (
    are_alike,
    are_different_columns,
    has_label,
    has_rows,
    has_tensors,
    is_record,
    is_table,
    is_tensor,
    is_tuple_of_lists,
    may_be_images,
    may_be_samples,
    may_be_views,
)

Reading: TypeAlias = Literal["columns", "lists", "samples"]

WAY_OUT = "Or define split_batch(batch, sizes) on the module, which cuts the batch itself."


class BatchSizeError(ValueError):
    """The batch does not have exactly one size along the dimension that is cut.

    Attributes:
        sizes: those that were found.
    """

    def __init__(self, message: str, sizes: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.sizes = sizes


class Counted(NamedTuple):
    """A node that may count the samples: a leaf, or a list of samples.

    Attributes:
        path: where it is in the batch.
        size: its length.
        items: the list, None for a leaf.
    """

    path: tree.Path
    size: int
    items: Sequence[Any] | None = None


def read(batch: Any, dim: int) -> tuple[int | None, Reading]:
    """The batch's size, None if it has none, and the reading that gives it.

    Raises:
        BatchSizeError: two leaves have different sizes, or two readings are as likely.

    Example:
        >>> import torch
        >>> boxes = [torch.zeros(n, 4) for n in (5, 0, 2)]
        >>> read([torch.zeros(3, 8), torch.zeros(3)], 0), read({"boxes": boxes}, 0)
        ((3, 'columns'), (3, 'lists'))
    """
    n = _plain_columns(batch, dim)
    if n is not None:
        return n, "columns"
    columns, entries = list(_columns(batch, dim, ())), _entries(batch, dim)
    lists = [entry for entry in entries if entry.items is not None]
    n, by_lists = _agreed(columns), _agreed(entries) if lists else None
    samples = _samples(batch)
    if n is not None and samples is not None and all(map(has_label, batch)):
        return samples, "samples"
    if n is not None:
        by_columns = by_lists is None or not any(has_rows(e.items, dim) for e in lists)
        return (n, "columns") if by_columns else _columns_or_lists(batch, columns, entries)
    if by_lists is not None:
        return _lists_or_samples(batch, by_lists, samples, lists)
    if samples is not None:
        return samples, "samples"
    return _loosely(batch, dim, columns, entries, bool(lists))


def holds_samples(node: Any, reading: Reading, dim: int, path: tree.Path) -> bool:
    """Whether a list or tuple of the batch's length has one item per sample."""
    if not has_tensors(node):
        return not isinstance(node, torch.Size) and not is_table(node)
    if not path:
        return reading == "samples"
    if not has_rows(node, dim):
        return not is_tuple_of_lists(node)
    return reading != "columns" and may_be_samples(node)


def _plain_columns(batch: Any, dim: int) -> int | None:
    """The one size of a tensor, or of the tensors in a container of nothing else."""
    tensors = batch if type(batch) in (list, tuple) else (batch,)
    if type(batch) is dict:
        tensors = batch.values()
    sizes = {TENSORS.size(t, dim) if type(t) is Tensor else None for t in tensors}
    return sizes.pop() if len(sizes) == 1 else None


def _columns_or_lists(
    batch: Any, columns: list[Counted], entries: list[Counted]
) -> tuple[int, Reading]:
    lists = [entry.items for entry in entries if entry.items is not None]
    by_columns, by_lists = columns[0].size, entries[0].size
    labels = {label.size for label in _labels(batch, ())}
    if by_columns != by_lists and len({by_columns, by_lists} & labels) == 1:
        return (by_columns, "columns") if by_columns in labels else (by_lists, "lists")
    has_images = by_columns == 3 and all(map(may_be_images, lists))
    if has_images or any(is_record(item) for items in lists for item in items):
        return by_lists, "lists"
    has_other_columns = by_columns == by_lists and len(lists) < len(entries)
    are_columns = any(may_be_views(items) or are_different_columns(items) for items in lists)
    if by_lists == 1 or has_other_columns or are_columns:
        return by_columns, "columns"
    path = next(entry.path for entry in entries if entry.items is not None)
    _ambiguous(
        f"{by_columns} samples if {tree.name(path)} holds columns, {by_lists} if it holds "
        "one item per sample. Put columns into a dict or stack them; beside lists of samples, "
        "yield a list with one name or number per sample.",
        (by_columns, by_lists),
    )


def _lists_or_samples(
    batch: Any, by_lists: int, samples: int | None, lists: list[Counted]
) -> tuple[int, Reading]:
    if samples is None or isinstance(batch, tuple):
        return by_lists, "lists"
    if all(isinstance(item, tuple) for item in batch):
        return samples, "samples"
    _ambiguous(
        f"{samples} samples if the batch is a list of samples, {by_lists} if "
        f"{tree.name(lists[0].path)} holds one item per sample. Yield samples as tuples in a list, "
        "and lists of samples in a dict.",
        (samples, by_lists),
    )


def _ambiguous(readings: str, sizes: tuple[int, ...]) -> NoReturn:
    message = f"Expected a batch that can be read in one way, got {readings} {WAY_OUT}"
    raise BatchSizeError(message, sizes)


def _loosely(
    batch: Any, dim: int, columns: list[Counted], entries: list[Counted], has_lists: bool
) -> tuple[int | None, Reading]:
    n, by_lists = _agreed(_large(columns)), _agreed(_large(entries)) if has_lists else None
    if n is None and by_lists is not None:
        return by_lists, "lists"
    if n is not None or not (found := columns or entries or list(_labels(batch, ()))):
        return n, "columns"
    n = _agreed(found) if _agreed(found) is not None else _agreed(_large(found))
    if n is None:
        _two_sizes(found, dim)
    return n, "columns"


def _large(found: list[Counted]) -> list[Counted]:
    return [counted for counted in found if counted.size != 1]


def _two_sizes(found: list[Counted], dim: int) -> NoReturn:
    first, *others = _large(found)
    other = next(counted for counted in others if counted.size != first.size)
    raise BatchSizeError(
        f"Expected one batch size along dim {dim}, got two: {tree.name(first.path)} has "
        f"{first.size} and {tree.name(other.path)} has {other.size}. Give both the same number of "
        "samples, or pass what is not cut as a number, a 0-dim tensor or with a length of 1; "
        f"give tensors of one sample each as a list in a dict. {WAY_OUT}",
        (first.size, other.size),
    )


def _agreed(found: list[Counted]) -> int | None:
    sizes = {counted.size for counted in found}
    return sizes.pop() if len(sizes) == 1 else None


def _columns(node: Any, dim: int, path: tree.Path) -> Iterator[Counted]:
    """Every leaf with rows."""
    kind = kind_of(node)
    if kind is not None:
        size = kind.size(node, dim)
        if size is not None:
            yield Counted(path, size)
        return
    for key, child in tree.children(node) or ():
        yield from _columns(child, dim, (*path, key))


def _entries(batch: Any, dim: int) -> list[Counted]:
    """The outermost lists of samples below the top, and the leaves with rows outside of them."""
    entries = list(_outermost(batch, dim, None, ()))
    n = _agreed([entry for entry in entries if entry.items is None])
    if n is None or _agreed(entries) is not None:
        return entries
    return list(_outermost(batch, dim, n, ()))


def _outermost(node: Any, dim: int, length: int | None, path: tree.Path) -> Iterator[Counted]:
    """Those lists that have `length`; with None, all."""
    is_list = bool(path) and tree.is_list(node) and length in (None, len(node))
    if is_list and has_tensors(node) and may_be_samples(node):
        yield Counted(path, len(node), node)
    elif kind_of(node) is not None:
        yield from _columns(node, dim, path)
    else:
        for key, child in tree.children(node) or ():
            yield from _outermost(child, dim, length, (*path, key))


def _samples(batch: Any) -> int | None:
    """The length of a batch that is a list of samples."""
    is_candidate = tree.is_list(batch) and has_tensors(batch) and are_alike(batch)
    return len(batch) if is_candidate and not any(map(is_tensor, batch)) else None


def _labels(node: Any, path: tree.Path) -> Iterator[Counted]:
    """The outermost lists without tensors."""
    if tree.is_list(node) and node and not has_tensors(node) and not is_table(node):
        yield Counted(path, len(node))
        return
    for key, child in () if kind_of(node) else tree.children(node) or ():
        yield from _labels(child, (*path, key))
