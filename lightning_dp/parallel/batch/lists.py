"""What the lists in a batch look like: samples, columns, or names and numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lightning_dp.parallel.batch import tree
from lightning_dp.parallel.batch.leaves import is_array, is_movable, kind_of, size_of


def may_be_samples(items: Sequence[Any]) -> bool:
    """Whether a list or tuple with tensors in it may have one item per sample: they are alike.

    A tuple of lists may not: it is a tuple of columns.
    """
    return not is_tuple_of_lists(items) and are_alike(items)


def is_tuple_of_lists(node: Sequence[Any]) -> bool:
    """Whether a node is a tuple with lists or tuples in it."""
    return isinstance(node, tuple) and any(tree.is_list(item) for item in node)


def are_alike(items: Sequence[Any]) -> bool:
    """Whether items have one structure, and their tensors one dtype and number of dims each.

    Items may be missing: None is like every other.

    Example:
        >>> import torch
        >>> are_alike([torch.zeros(5, 4), None, torch.zeros(2, 4)])
        True
        >>> are_alike([torch.zeros(8, 3), torch.zeros(8)])
        False
    """
    return len({_signature(item) for item in items if item is not None}) == 1


def may_be_columns(items: Sequence[Any]) -> bool:
    """Whether matrices differ in the length of their rows, as `[x, y]` do, or one is missing.

    Of several DataLoaders, one that is exhausted yields None.
    """
    if any(item is None for item in items):
        return True
    are_matrices = all(is_tensor(item) and item.ndim == 2 for item in items)
    return are_matrices and len({item.shape[1] for item in items}) > 1


def is_record(item: Any) -> bool:
    """Whether an item is a mapping or an object: no tensor, and no list of some."""
    return item is not None and not is_tensor(item) and not tree.is_list(item)


def has_label(item: Any) -> bool:
    """Whether an item has a number in it, beside other things: it is one sample.

    Example:
        >>> import torch
        >>> has_label((torch.zeros(3), 1)), has_label({"x": torch.zeros(3), "name": "a"})
        (True, False)
    """
    entries = [child for _, child in tree.children(item) or ()]
    return any(x.ndim == 0 if is_tensor(x) else type(x) in (int, float) for x in entries)


def has_names(node: Sequence[Any]) -> bool:
    """Whether a list without tensors has one name, number or other value per sample.

    Lists of strings of one length in a list have not: these are columns, as `default_collate` makes
    them. Nor has what an exhausted DataLoader leaves, which is nothing but None.
    """
    lengths = {len(item) if _is_strings(item) else None for item in node}
    is_table = len(lengths) == 1 and None not in lengths
    return not is_table and any(item is not None for item in node)


def has_rows(node: Any, dim: int) -> bool:
    """Whether any leaf has a size along `dim`."""
    return any(size_of(leaf, dim) is not None for leaf in tree.leaves(node))


def has_tensors(node: Any) -> bool:
    """Whether there are tensors in a node, 0-dim ones too, or objects that go to a device."""
    return any(kind_of(leaf) is not None or is_movable(leaf) for leaf in tree.leaves(node))


def is_tensor(node: Any) -> bool:
    """Whether a node is a tensor, or an array of NumPy."""
    return isinstance(node, Tensor) or is_array(node)


def _signature(node: Any) -> Any:
    if is_tensor(node):
        return node.dtype, node.ndim
    pairs = None if kind_of(node) else tree.children(node)
    if pairs is None:
        return type(node) if is_movable(node) else None
    if not tree.is_list(node):
        return type(node), tuple((key, _signature(child)) for key, child in pairs)
    signatures = [_signature(child) for _, child in pairs]
    is_of_one_kind = len(set(signatures)) <= 1  # then its length may vary, as of lists of boxes
    return list, tuple(signatures[:1] if is_of_one_kind else signatures)


def _is_strings(node: Any) -> bool:
    return tree.is_list(node) and bool(node) and all(isinstance(x, str | bytes) for x in node)
