"""Reads a batch: how many samples it has, which lists hold one item per sample, what each costs.

A batch has n samples if each tensor has n rows along `dim`, or one, which goes to every replica,
and if each list with tensors in it, below the top of the batch, either

- **has columns**: all tensors in it have n rows, as PyTorch's `default_collate` makes them, and its
  items are no mappings or objects;
- or **holds samples**: it has n items of one structure, as in detection. A list of tensors of one
  size holds samples only if another list, also one of names or numbers, has as many items.

Where several n are possible, the one that a list of names or numbers has is taken, else the one by
which all lists have columns; else the batch is refused. A batch that is itself a list of alike
tuples, mappings or objects is a **list of samples** if it cannot be read as columns, or if every
item holds a number, which is a label. A list of lists that are no columns is refused: it may hold
samples, or batches of several loaders. A module's `batch_size(batch)` decides the number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from lightning_dp.parallel.errors import add_note, noted
from lightning_dp.parallel.scatter import tree
from lightning_dp.parallel.scatter.tree import is_array, is_movable, leaf_type, size_of

Kind: TypeAlias = Literal["flat", "columns", "lists", "samples"]
"""How a batch is read.

- "flat": a tensor, or a container of tensors alone, all with n rows;
- "columns": tensors with n rows in nested containers;
- "lists": as columns, and lists of n items hold one item per sample;
- "samples": the batch itself is a list of n samples.
"""

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


class _Found:
    """The parts of a batch: leaves with rows, the outermost lists with tensors, lists of names."""

    def __init__(self, batch: Any, dim: int) -> None:
        self.rows: list[tuple[tree.Path, int]] = []  # of all leaves that have any
        self.outside = set[int]()  # the numbers of rows outside of `lists`
        self.lists: list[tuple[tree.Path, list[Any], set[int]]] = []  # with the numbers of rows
        self.names: list[tuple[tree.Path, int]] = []
        self._visit(batch, dim, (), None)

    def _visit(self, node: Any, dim: int, path: tree.Path, inside: set[int] | None) -> None:
        if tree.is_list(node) and inside is None:
            if _holds_names(node):
                self.names.append((path, len(node)))
                return
            if path and _has_tensors(node) and not _is_tuple_of_lists(node) and are_alike(node):
                inside = set()
                self.lists.append((path, node, inside))
        pairs = tree.children(node)
        for key, child in pairs or ():
            self._visit(child, dim, (*path, key), inside)
        try:
            size = size_of(node, dim) if pairs is None else None
        except Exception as error:
            add_note(error, f"[cutting {tree.name(path)}, a {type(node).__qualname__}: its size]")
            raise
        if size is not None:
            self.rows.append((path, size))
            (self.outside if inside is None else inside).add(size)

    @property
    def lengths(self) -> list[tuple[tree.Path, int]]:
        """The lengths of lists with tensors."""
        return [(path, len(items)) for path, items, _ in self.lists]


def infer_batch_size(batch: Any, dim: int, *, is_call_arguments: bool = False) -> Inferred:
    """How a batch is read by its contents.

    With `is_call_arguments` lists have columns wherever they can, and a list has one item per
    sample only beside a tensor that says so.

    Example:
        >>> boxes = [torch.zeros(n, 4) for n in (5, 0, 2)]
        >>> tuple(infer_batch_size([torch.zeros(3, 8), torch.zeros(3)], 0))
        (3, 'columns')
        >>> tuple(infer_batch_size({"boxes": boxes}, 0))
        (3, 'lists')
    """
    found = _Found(batch, dim)
    is_one = found.outside == {1}
    named = {n for _, n in found.names}
    confirmed = named | {
        len(items)
        for _, items, inside in found.lists
        if not all(map(_is_tensor, items)) or len(inside) != 1 or inside == {1}
    }

    def has_columns(items: list[Any], inside: set[int], n: int) -> bool:
        are_plain = all(x is None or _is_tensor(x) or tree.is_list(x) for x in items)
        are_plain |= is_one and isinstance(items, tuple)  # one sample's objects, one per column
        return inside <= {n} and are_plain and not (is_one and len(items) == 1 != n)

    numbers = found.outside.union(*(inside | {len(items)} for _, items, inside in found.lists))
    possible, columns = [], []
    for n in numbers:
        have = [has_columns(items, inside, n) for _, items, inside in found.lists]
        hold = [n == length and (n in confirmed or is_one) for _, length in found.lengths]
        if found.outside <= {n, 1} and all(map(max, have, hold)):
            possible.append(n)
            columns.extend([n] * all(have))
    if _is_list_of_samples(batch):
        has_numbers = all(map(_has_number, batch))
        if has_numbers or (not columns and (isinstance(batch, list) or not possible)):
            if not has_numbers and any(type(item) is list for item in batch):
                raise BatchSizeError(
                    f"Expected a batch that can be read in one way, got a list of {len(batch)} "
                    "lists: they may be samples, columns of samples, or batches of several "
                    f"loaders. Yield samples as tuples in a list, and columns in a dict. {WAY_OUT}"
                )
            return Inferred(len(batch), "samples")
    if is_call_arguments:
        choices = [columns, possible if found.outside else []]
    else:
        choices = [[n for n in possible if n in named], columns, possible]
    for choice in choices:
        if len(choice) == 1:
            return Inferred(choice[0], "columns" if choice[0] in columns else "lists")
    return Inferred(_agreed_or_raise(found, dim), "columns")


def _agreed_or_raise(found: _Found, dim: int) -> int | None:
    """The one size beside sizes of 1, of leaves with rows or else of names; None without any."""
    parts = found.rows or found.lengths or found.names
    parts = [part for part in parts if part[1] != 1] or parts
    for path, size in parts:
        if size != parts[0][1]:
            raise BatchSizeError(
                f"Expected one batch size along dim {dim}, got two: {tree.name(parts[0][0])} has "
                f"{parts[0][1]} and {tree.name(path)} has {size}. Give both the same "
                "number of samples, or pass what is not cut as a number, a 0-dim tensor or with a "
                f"length of 1; give tensors of one sample each as a list in a dict. {WAY_OUT}"
            )
    return parts[0][1] if parts else None


def read_as_module_says(module: Any, batch: Any, dim: int, **options: bool) -> Inferred:
    """Reads a batch whose size is `module.batch_size(batch)`.

    As `infer_batch_size` does if that finds the same size; else all that has this size is cut.
    """
    name = f"{type(module).__qualname__}.batch_size"
    with noted(f"[cutting the batch, {name}]"):
        size = module.batch_size(batch)
    if type(size) is not int or size < 0:
        wanted = "the number of samples as an int of at least 0"
        raise BatchSizeError(f"{name}: expected {wanted}, got {size!r:.80}. Return that.")
    if hasattr(module, "split_batch"):
        return Inferred(size, "columns")
    with suppress(BatchSizeError):
        by_contents = infer_batch_size(batch, dim, **options)
        if by_contents.size == size:
            return by_contents
    found = _Found(batch, dim)
    lengths = {n for _, n in (*found.rows, *found.lengths, *found.names)}
    lengths |= {len(batch)} if _is_list_of_samples(batch) else set()
    if size > 1 and size not in lengths:
        raise BatchSizeError(
            f"{name}: expected the length of something in the batch along dim {dim} "
            f"{tuple(sorted(lengths))}, got {size}. Return that number. {WAY_OUT}"
        )
    return Inferred(size, "columns")


def holds_samples(node: Any, reading: Kind, dim: int, path: tree.Path) -> bool:
    """Whether a list or tuple of the batch's length has one item per sample."""
    if not _has_tensors(node):
        return _holds_names(node) and not isinstance(node, torch.Size)
    if _is_tuple_of_lists(node):
        return False
    if reading == "samples" or all(size_of(leaf, dim) != len(node) for leaf in tree.leaves(node)):
        return True
    return bool(path) and reading == "lists" and are_alike(node)


def are_alike(items: Iterable[Any]) -> bool:
    """Whether items have one structure, and their tensors one dtype and number of dims each.

    Items may be missing: None is like every other.
    """
    return len({_signature(item) for item in items if item is not None}) == 1


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


def _is_list_of_samples(batch: Any) -> bool:
    """Whether a batch is a list of alike items with tensors, none of which is a bare tensor."""
    is_list = tree.is_list(batch) and not any(map(_is_tensor, batch))
    return is_list and _has_tensors(batch) and are_alike(batch)


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


# --- Costs


def sample_costs(module: nn.Module, batch: Any, n: int, key: str | None = None) -> Tensor:
    """The costs of a batch's samples, by `module.sample_cost(batch)` or an entry of the batch.

    Dots in the key lead into nested entries ("text.lengths"), numbers into lists ("1").

    Example:
        >>> sample_costs(nn.Identity(), {"lengths": torch.tensor([3, 9])}, 2, "lengths")
        tensor([3., 9.], dtype=torch.float64)
    """
    name = type(module).__qualname__
    if hasattr(module, "split_batch"):
        hint = "It gets sizes, but not which samples go where. Leave out one of the two."
        raise ValueError(f"split='cost': expected no split_batch on {name}, got one. {hint}")
    if not key and not hasattr(module, "sample_cost"):
        raise ValueError(
            f"split='cost': expected a method sample_cost(batch) on {name}, or "
            "sample_cost='lengths' to name an entry of the batch, got neither. Define one of "
            "them, or use split='even'."
        )
    found: Any = _entry(batch, key) if key else module.sample_cost(batch)  # type: ignore[operator]  # a method
    try:
        costs = torch.as_tensor(found, dtype=torch.double, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError):
        costs = torch.empty(())
    if costs.shape != (n,) or not 0 <= costs.amin() <= costs.amax() < math.inf:
        shape = f" of shape {tuple(found.shape)}" if hasattr(found, "shape") else ""
        raise ValueError(
            f"{f'sample_cost={key!r}' if key else f'{name}.sample_cost'}: expected {n} finite "
            f"numbers of at least 0, one per sample, got {type(found).__qualname__}{shape}: "
            f"{found!r:.60}. Give one number per sample."
        )
    return costs


def _entry(batch: Any, key: str) -> Any:
    node = batch
    for part in key.split("."):
        entries = {str(getattr(k, "name", k)): child for k, child in tree.children(node) or ()}
        if part not in entries:
            raise ValueError(
                f"sample_cost={key!r}: expected an entry {part!r} in the batch, got "
                f"{sorted(entries) or type(node).__qualname__}. Correct the key (in forward mode "
                "the batch is the arguments of the call, by position or name)."
            )
        node = entries[part]
    return node
