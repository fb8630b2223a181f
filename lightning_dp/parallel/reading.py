"""How a batch is read: what in it counts the samples, and what is cut into shards.

Tensors are columns of a batch, one row per sample; lists are containers of columns (as PyTorch's
`default_collate` makes them), or they hold one item per sample (as detection batches do). Nothing
in a batch says which, so the readings are tried in order, and the first under which everything
agrees on one size is taken:

1. **columns**: all tensors have one size along `dim`. Lists of names, labels and other leaves
   without such tensors are cut if they have that length.
2. **lists**: each outermost list or tuple below the top of the batch whose items are alike holds
   one item per sample; tensors outside such lists are columns.
3. **samples**: the batch itself is a list or tuple of samples, which are alike and no bare tensors.
   (A list of bare tensors is `[x, y]`.)
4. **columns**, then **lists**, where sizes of 1 do not count: such leaves go to every replica.
5. Without tensors: lists of names, labels and other leaves have one length.

Two readings that would cut a batch differently are an error, unless one is far more likely:

- 1 and 2, as in `{"views": [a, b]}`: lists of names or numbers decide by their length; else lists
  of mappings or objects hold samples (targets of which each happens to have as many boxes); lists
  of one tensor hold a column, and so do lists of up to three tensors with rows of different shapes
  (`[x, y]`), and lists beside other columns where both readings count the same.
- 2 and 3: `(list, list)` is a tuple of columns, `[(x, y), (x, y)]` a list of samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, NoReturn, TypeAlias

import torch
from torch import Tensor

from lightning_dp.parallel import tree
from lightning_dp.parallel.leaves import TENSORS, is_array, is_movable, kind_of

Reading: TypeAlias = Literal["columns", "lists", "samples"]

WAY_OUT = "Or define split_batch(batch, sizes) on the module, which cuts the batch itself."


class BatchSizeError(ValueError):
    """The batch does not have exactly one size along the dimension that is cut.

    Attributes:
        first_size: that of the first leaf that has one; None where it is not sizes that disagree.
    """

    first_size: int | None = None


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
    columns, entries = list(_columns(batch, dim, ())), list(_entries(batch, dim))
    lists = [entry for entry in entries if entry.items is not None]
    n, by_lists = _agreed(columns), _agreed(entries) if lists else None
    if n is not None:
        by_columns = by_lists is None or not any(_has_rows(e.items, dim) for e in lists)
        return (n, "columns") if by_columns else _columns_or_lists(batch, columns, entries)
    samples = _samples(batch)
    if by_lists is not None:
        return _lists_or_samples(batch, by_lists, samples, lists)
    if samples is not None:
        return samples, "samples"
    return _loosely(batch, dim, columns, entries, bool(lists))


def holds_samples(node: Any, reading: Reading, dim: int, path: tree.Path) -> bool:
    """Whether a list or tuple of the batch's length has one item per sample."""
    if not _has_rows(node, dim):
        return not isinstance(node, torch.Size) and not _is_table(node)
    if reading == "columns":
        return False
    return bool(path) == (reading == "lists") and _are_alike(node)


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
    if any(_is_record(item) for items in lists for item in items):
        return by_lists, "lists"
    has_other_columns = by_columns == by_lists and len(lists) < len(entries)
    if by_lists == 1 or has_other_columns or any(map(_are_different_columns, lists)):
        return by_columns, "columns"
    path = next(entry.path for entry in entries if entry.items is not None)
    _ambiguous(
        f"{by_columns} samples if {tree.name(path)} holds columns, {by_lists} if it holds "
        "one item per sample. Put columns into a dict or stack them; beside lists of samples, "
        "yield a list with one name or number per sample."
    )


def _is_record(item: Any) -> bool:
    return not _is_array(item) and not tree.is_list(item)


def _are_different_columns(items: Sequence[Any]) -> bool:
    """Whether few tensors differ in the shape of their rows, as `[x, y]` do."""
    are_few_arrays = len(items) <= 3 and all(_is_array(item) for item in items)
    return are_few_arrays and len({tuple(item.shape[1:]) for item in items}) > 1


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
        "and lists of samples in a dict."
    )


def _ambiguous(readings: str) -> NoReturn:
    raise BatchSizeError(f"Expected a batch that can be read in one way, got {readings} {WAY_OUT}")


def _loosely(
    batch: Any, dim: int, columns: list[Counted], entries: list[Counted], has_lists: bool
) -> tuple[int | None, Reading]:
    for reading, found in (("columns", columns), ("lists", entries if has_lists else [])):
        n = _agreed([counted for counted in found if counted.size != 1])
        if n is not None:
            return n, "columns" if reading == "columns" else "lists"
    found = columns or entries or list(_labels(batch, ()))
    n = _agreed(found) or _agreed([counted for counted in found if counted.size != 1])
    if n is None and found:
        _two_sizes(found, dim)
    return n, "columns"


def _two_sizes(found: list[Counted], dim: int) -> NoReturn:
    first, *others = (counted for counted in found if counted.size != 1)
    other = next(counted for counted in others if counted.size != first.size)
    error = BatchSizeError(
        f"Expected one batch size along dim {dim}, got two: {tree.name(first.path)} has "
        f"{first.size} and {tree.name(other.path)} has {other.size}. Give both the same number of "
        "samples, or pass what is not cut as a number, a 0-dim tensor or with a length of 1; "
        f"give tensors of one sample each as a list in a dict. {WAY_OUT}"
    )
    error.first_size = first.size
    raise error


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


def _entries(node: Any, dim: int, path: tree.Path = ()) -> Iterator[Counted]:
    """The outermost lists of samples below the top, and the leaves with rows outside of them."""
    if path and tree.is_list(node) and _has_tensors(node) and _are_alike(node):
        yield Counted(path, len(node), node)
    elif kind_of(node) is not None:
        yield from _columns(node, dim, path)
    else:
        for key, child in tree.children(node) or ():
            yield from _entries(child, dim, (*path, key))


def _samples(batch: Any) -> int | None:
    """The length of a batch that is a list of samples."""
    is_candidate = tree.is_list(batch) and _has_tensors(batch) and _are_alike(batch)
    return len(batch) if is_candidate and not _is_array(batch[0]) else None


def _labels(node: Any, path: tree.Path) -> Iterator[Counted]:
    """The outermost lists without tensors."""
    if tree.is_list(node) and node and not _has_tensors(node) and not _is_table(node):
        yield Counted(path, len(node))
        return
    for key, child in () if kind_of(node) else tree.children(node) or ():
        yield from _labels(child, (*path, key))


def _is_table(node: Sequence[Any]) -> bool:
    """Lists of strings of one length in a list: columns of a batch, as `default_collate` makes."""
    lengths = {len(item) if _is_strings(item) else None for item in node}
    return len(lengths) == 1 and None not in lengths


def _is_strings(node: Any) -> bool:
    return tree.is_list(node) and bool(node) and all(isinstance(x, str | bytes) for x in node)


def _are_alike(items: Sequence[Any]) -> bool:
    """Whether items have one structure, and their tensors one dtype and number of dims each."""
    return len({_signature(item) for item in items}) == 1


def _signature(node: Any) -> Any:
    if _is_array(node):
        return node.dtype, node.ndim
    pairs = None if kind_of(node) else tree.children(node)
    if pairs is None:
        return type(node) if is_movable(node) else None
    if not tree.is_list(node):
        return type(node), tuple((key, _signature(child)) for key, child in pairs)
    signatures = [_signature(child) for _, child in pairs]
    is_of_one_kind = len(set(signatures)) <= 1  # then its length may vary, as of lists of boxes
    return list, tuple(signatures[:1] if is_of_one_kind else signatures)


def _has_rows(node: Any, dim: int) -> bool:
    return _any_leaf(
        node, lambda leaf: (k := kind_of(leaf)) is not None and k.size(leaf, dim) is not None
    )


def _has_tensors(node: Any) -> bool:
    return _any_leaf(node, lambda leaf: kind_of(leaf) is not None or is_movable(leaf))


def _any_leaf(node: Any, test: Callable[[Any], bool]) -> bool:
    pairs = tree.children(node)
    return test(node) if pairs is None else any(_any_leaf(child, test) for _, child in pairs)


def _is_array(node: Any) -> bool:
    return isinstance(node, Tensor) or is_array(node)
