"""How many samples a batch has, and which of its lists hold one item per sample.

Nothing in a batch says so, and there are two readings:

- **columns**, as PyTorch's `default_collate` makes them: every tensor has one row per sample, and
  lists are containers of columns. Lists of names and numbers of that length are columns too.
- **lists of samples**, as in detection: the outermost lists below the top of the batch, whose items
  are alike, have one item per sample, and tensors beside them are columns; or the batch itself is
  a list of samples (tuples, mappings or objects that are alike, no bare tensors).

The first reading under which all agree on one size is taken; sizes of 1 beside a larger one do not
count (such a leaf goes to every replica). Where both count, but differently, this is a rule:

- lists of mappings or objects below the top hold samples, and so does a batch that is a list of
  tuples, mappings or objects with a number each, the label;
- a list of names or numbers decides by its length;
- a list of lists, in each of which all tensors have one size, may hold samples, or batches of
  several loaders: that is an error, and samples are tuples;
- lists of one item, of matrices whose rows differ in length, and with None in them are columns, and
  so are lists beside other columns where both readings count the same.

Everything else is an error that names both readings. A module's `batch_size(batch)` ends all doubt
about the number: what has another length goes to every replica.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, NoReturn, TypeAlias

import torch
from torch import nn

from lightning_dp.parallel.batch import tree
from lightning_dp.parallel.batch.counted import (
    Counted,
    agreed,
    entries_of,
    labels_of,
    large,
    rows_of,
    samples_in,
)
from lightning_dp.parallel.batch.leaves import kind_of
from lightning_dp.parallel.batch.lists import (
    has_label,
    has_names,
    has_rows,
    has_tensors,
    is_record,
    is_tuple_of_lists,
    may_be_columns,
    may_be_samples,
)

Reading: TypeAlias = Literal["columns", "lists", "samples"]

WAY_OUT = (
    "Or define batch_size(batch) on the module, which says how many samples there are, or "
    "split_batch(batch, sizes), which cuts the batch itself."
)


class BatchSizeError(ValueError):
    """The batch does not have exactly one size along the dimension that is cut."""


class Inferred(NamedTuple):
    """How many samples a batch has, None if there is nothing to cut, and how it was read."""

    size: int | None
    reading: Reading


def told_by(module: nn.Module, batch: Any, dim: int, *, columns: bool) -> Inferred:
    """How a batch is read of which a module says something; see `infer_for`."""
    own: Any = getattr(module, "batch_size", None)
    cuts_itself, is_asked = hasattr(module, "split_batch"), callable(own)
    told = own(batch) if is_asked else _length(batch) if cuts_itself else None
    if told is None and not is_asked:
        return infer_batch_size(batch, dim, columns=columns)
    if type(told) is not int or told < 0:
        raise BatchSizeError(
            f"{type(module).__qualname__}.batch_size: expected the number of samples as an int of "
            f"at least 0, got {told!r:.80}. Return how many samples the batch has."
        )
    if not cuts_itself and told > 1:
        _check_there_is(told, module, batch, dim)
    return Inferred(told, "columns") if cuts_itself or columns else _told(batch, dim, told)


def infer_batch_size(batch: Any, dim: int, *, columns: bool = False) -> Inferred:
    """How a batch is read, by what is in it.

    Example:
        >>> import torch
        >>> boxes = [torch.zeros(n, 4) for n in (5, 0, 2)]
        >>> tuple(infer_batch_size([torch.zeros(3, 8), torch.zeros(3)], 0))
        (3, 'columns')
        >>> tuple(infer_batch_size({"boxes": boxes}, 0))
        (3, 'lists')
    """
    rows = rows_of(batch, dim)
    n = agreed(rows)
    if columns:
        return Inferred(_loosely(batch, dim, rows) if n is None else n, "columns")
    entries = entries_of(batch, dim)
    lists = [entry for entry in entries if entry.items is not None]
    by_lists, samples = agreed(entries) if lists else None, samples_in(batch)
    if n is not None and samples is not None and all(map(has_label, batch)):
        return Inferred(samples, "samples")
    if n is not None and by_lists is not None and any(has_rows(e.items, dim) for e in lists):
        return _columns_or_lists(batch, n, by_lists, entries)
    if n is not None:
        return Inferred(n, "columns")
    if by_lists is not None:
        return _lists_or_samples(batch, by_lists, samples, lists)
    if samples is not None:
        _check_samples(batch, samples, dim)
        return Inferred(samples, "samples")
    n, by_lists = agreed(large(rows)), agreed(large(entries)) if lists else None
    if n is None and by_lists is not None:
        return Inferred(by_lists, "lists")
    return Inferred(_loosely(batch, dim, rows or entries), "columns")


def holds_samples(node: Any, reading: Reading, dim: int, path: tree.Path) -> bool:
    """Whether a list or tuple of the batch's length has one item per sample."""
    if not has_tensors(node):
        return has_names(node) and not isinstance(node, torch.Size)
    if not path:
        return reading == "samples"
    if not has_rows(node, dim):
        return not is_tuple_of_lists(node)
    return reading != "columns" and may_be_samples(node)


def _length(batch: Any) -> int | None:
    """The length of a batch object; that of a container or a tensor is something else."""
    if kind_of(batch) is not None or isinstance(batch, Mapping | list | tuple | str):
        return None
    return len(batch) if hasattr(type(batch), "__len__") else None


def _told(batch: Any, dim: int, n: int) -> Inferred:
    """The reading of a batch of n samples: lists of n items hold samples, unless n rows each."""
    has_lists = any(e.items is not None and e.size == n for e in entries_of(batch, dim))
    has_samples = samples_in(batch) == n
    has_columns_alone = agreed(rows_of(batch, dim)) == n
    if has_columns_alone and (has_lists or has_samples):
        return infer_batch_size(batch, dim)
    if has_columns_alone or not (has_lists or has_samples):
        return Inferred(n, "columns")
    return Inferred(n, "lists" if has_lists else "samples")


def _check_there_is(n: int, module: nn.Module, batch: Any, dim: int) -> None:
    """Raises an error if nothing in a batch has n rows or items: all of it would go everywhere."""
    found = {row.size for row in (*rows_of(batch, dim), *entries_of(batch, dim), *labels_of(batch))}
    if n not in found and samples_in(batch) != n:
        raise BatchSizeError(
            f"{type(module).__qualname__}.batch_size: expected the length of something in the "
            f"batch along dim {dim} {(*found,)}, got {n}. Return that number. {WAY_OUT}"
        )


def _columns_or_lists(batch: Any, n: int, by_lists: int, entries: list[Counted]) -> Inferred:
    lists = [entry.items for entry in entries if entry.items is not None]
    labels = {label.size for label in labels_of(batch)}
    if n != by_lists and len({n, by_lists} & labels) == 1:
        return Inferred(n, "columns") if n in labels else Inferred(by_lists, "lists")
    if any(is_record(item) for items in lists for item in items):
        return Inferred(by_lists, "lists")
    has_other_columns = n == by_lists and len(lists) < len(entries)
    if by_lists == 1 or has_other_columns or any(map(may_be_columns, lists)):
        return Inferred(n, "columns")
    path = next(entry.path for entry in entries if entry.items is not None)
    _ambiguous(
        f"{n} samples if {tree.name(path)} holds columns, {by_lists} if it holds one item per "
        "sample. Put columns into a dict or stack them; beside lists of samples, yield a list with "
        "one name or number per sample."
    )


def _lists_or_samples(
    batch: Any, by_lists: int, samples: int | None, lists: list[Counted]
) -> Inferred:
    if samples is None or isinstance(batch, tuple):
        return Inferred(by_lists, "lists")
    if all(isinstance(item, tuple) for item in batch):
        return Inferred(samples, "samples")
    _ambiguous(
        f"{samples} samples if the batch is a list of samples, {by_lists} if "
        f"{tree.name(lists[0].path)} holds one item per sample. Yield samples as tuples in a list, "
        "and lists of samples in a dict."
    )


def _check_samples(batch: Any, samples: int, dim: int) -> None:
    """Raises an error if a list of lists may as well hold batches of several loaders."""
    sizes = [agreed(rows_of(item, dim)) for item in batch if type(item) is list]
    if type(batch) is list and len(sizes) == len(batch) and None not in sizes:
        _ambiguous(
            f"{samples} samples if it is a list of samples, and batches of {sizes} samples if each "
            "list is one of a loader. Yield samples as tuples in a list, and of several loaders "
            "batches of one size in a dict."
        )


def _ambiguous(readings: str) -> NoReturn:
    raise BatchSizeError(f"Expected a batch that can be read in one way, got {readings} {WAY_OUT}")


def _loosely(batch: Any, dim: int, found: list[Counted]) -> int | None:
    """The one size beside sizes of 1, of leaves with rows or else of names; None without any."""
    found = found or labels_of(batch)
    several = large(found)
    n = agreed(several or found)
    if n is None and found:
        first, other = next((several[0], c) for c in several if c.size != several[0].size)
        raise BatchSizeError(
            f"Expected one batch size along dim {dim}, got two: {tree.name(first.path)} has "
            f"{first.size} and {tree.name(other.path)} has {other.size}. Give both the same number "
            "of samples, or pass what is not cut as a number, a 0-dim tensor or with a length of "
            f"1; give tensors of one sample each as a list in a dict. {WAY_OUT}"
        )
    return n
