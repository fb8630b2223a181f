"""What in a batch may count its samples: leaves with rows, lists with items, names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from lightning_dp.parallel.batch import tree
from lightning_dp.parallel.batch.leaves import kind_of, size_of
from lightning_dp.parallel.batch.lists import (
    are_alike,
    has_names,
    has_tensors,
    is_tensor,
    may_be_samples,
)


class Counted(NamedTuple):
    """A node that may count the samples: where it is, its length, and its items if it is a list."""

    path: tree.Path
    size: int
    items: Sequence[Any] | None = None


def large(found: list[Counted]) -> list[Counted]:
    """Those that are more than one."""
    return [counted for counted in found if counted.size != 1]


def agreed(found: list[Counted]) -> int | None:
    """The one size that all have; None if there are several, or nothing is there."""
    sizes = {counted.size for counted in found}
    return sizes.pop() if len(sizes) == 1 else None


def _parts(
    node: Any, is_whole: Callable[[Any], bool] | None = None, path: tree.Path = ()
) -> Iterator[tuple[tree.Path, Any]]:
    """The leaves of a batch, and the outermost lists that are taken as a whole."""
    is_one = is_whole is not None and tree.is_list(node) and is_whole(node)
    pairs = None if is_one or kind_of(node) else tree.children(node)
    if pairs is None:
        yield path, node
    for key, child in pairs or ():
        yield from _parts(child, is_whole, (*path, key))


def _counted(parts: Iterable[tuple[tree.Path, Any]], dim: int) -> Iterator[Counted]:
    for path, node in parts:
        if tree.is_list(node):
            yield Counted(path, len(node), node)
        elif (size := size_of(node, dim)) is not None:
            yield Counted(path, size)


def rows_of(batch: Any, dim: int) -> list[Counted]:
    """Every leaf with rows."""
    return list(_counted(_parts(batch), dim))


def entries_of(batch: Any, dim: int) -> list[Counted]:
    """The outermost lists of samples below the top, and the leaves with rows outside of them."""

    def holds_samples(node: Any, length: int | None = None) -> bool:
        is_inside = node is not batch and length in (None, len(node))
        return is_inside and has_tensors(node) and may_be_samples(node)

    entries = list(_counted(_parts(batch, holds_samples), dim))
    n = agreed([entry for entry in entries if entry.items is None])
    if n is None or agreed(entries) is not None:
        return entries
    # Beside columns, only lists as long as these.
    return list(_counted(_parts(batch, partial(holds_samples, length=n)), dim))


def samples_in(batch: Any) -> int | None:
    """The length of a batch that is a list of samples."""
    is_candidate = tree.is_list(batch) and has_tensors(batch) and are_alike(batch)
    return len(batch) if is_candidate and not any(map(is_tensor, batch)) else None


def labels_of(batch: Any) -> list[Counted]:
    """The outermost lists without tensors."""
    lists = _parts(batch, lambda node: not has_tensors(node) and has_names(node))
    return [Counted(path, len(node), node) for path, node in lists if tree.is_list(node)]
