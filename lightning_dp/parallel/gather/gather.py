"""Gather: the replicas' outputs become what one device would have returned for the whole batch.

[Note: the rule for rows]
A tensor whose size along a dimension is each shard's number of samples has rows of samples and is
concatenated there; along `dim`, if that is one of several. What has the same value everywhere is
kept. Anything else is refused by name, with `gather_overrides` as the way out. Batches are never
cut in order to find out: the first-step check cuts unequally, and says where an output is not that
of one device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NoReturn, TypeAlias, get_args

import torch
from torch import Tensor
from torch.distributions import Distribution

from lightning_dp.parallel.checks import check_choice, expected, is_choice, short_repr
from lightning_dp.parallel.devices import DeviceLike, minus_one_is_cpu, resolve_devices
from lightning_dp.parallel.scatter import (
    BatchSizeError,
    Override,
    RowRules,
    are_alike,
    infer_batch_size,
    to_device_together,
    tree,
    weighted_mean,
)
from lightning_dp.parallel.scatter.tree import TENSORS, is_array, leaf_type, move, size_of
from lightning_dp.parallel.split import Sizes

Scalars: TypeAlias = Literal["merge", "stack"]
Fit: TypeAlias = Literal["rows", "uneven", "same", "ragged"]

OVERRIDES = ("mean", "sum", "stack", "cat", "first", "list")


class GatherError(ValueError):
    """The replicas' outputs do not fit together; the message names the leaf."""


def gather(
    outputs: Sequence[Any],
    output_device: DeviceLike,
    dim: int = 0,
    *,
    sizes: Sequence[int] | None = None,
    scalars: Scalars = "merge",
    overrides: Mapping[str, Override] | None = None,
) -> Any:
    """Joins the replicas' outputs, in shard order, on the output device.

    | leaf on every replica                    | result                                        |
    |------------------------------------------|-----------------------------------------------|
    | tensor, array: one row per sample        | concatenated along the dim of the shards'     |
    |                                          | sizes; along `dim`, if that is one of them    |
    | the same value everywhere                | that value                                    |
    | 0-dim floating tensor, float             | mean, weighted by shard size                  |
    | 0-dim integer tensor, int                | sum                                           |
    | list: one item per sample                | joined                                        |
    | other containers, see `scatter.tree`     | child by child; keys that some replicas lack, |
    |                                          | from those that have them, into a dict        |
    | other leaves of `scatter.tree`           | joined in their own way                       |
    | tensors that differ beside `dim`         | list with one per replica, with a warning     |
    | strings that differ                      | list with one per replica                     |
    | None from some replicas                  | left out                                      |
    | all else                                 | an error that names the leaf                  |

    Tensors cross in few copies per source device and dtype; on return they can be read, also on the
    CPU. Differentiable.

    Args:
        outputs: one output per replica, on any device; None for a replica without samples.
        output_device: any device, as `torch.device`, name or id; -1 is the CPU, as for
            `torch.nn.parallel.gather`.
        dim: the dimension along which tensors are joined.
        sizes: samples of each of these outputs. None: the outputs' own batch sizes if all have
            one, else equal shards.
        scalars: `"merge"` for the table's means and sums of 0-dim tensors, `"stack"` for a tensor
            with one per replica, as `torch.nn.DataParallel` gives.
        overrides: how to join what has a certain key or field name, or lies at a dotted path such
            as `"aux.count"` (`""` is the output itself, `"0"` the first of a tuple): `"mean"`
            (weighted by shard size), `"sum"`, `"stack"` (along a new first dim), `"cat"`,
            `"first"` (the first replica's), `"list"`, `pad(value)` for rows that are as long as the
            longest of their shard, or a function that takes the list of the replicas' values and
            returns the joint one. It holds for all that is in a container; a function gets the
            container itself.

    Raises:
        GatherError: an output has no joint value, or an override is not possible.
        ValueError: an unknown option, no such device, or not one size per output.

    Example:
        >>> first = {"y": torch.tensor([1, 2]), "loss": 1.0, "count": torch.tensor(2)}
        >>> second = {"y": torch.tensor([3]), "loss": 4.0, "count": torch.tensor(1)}
        >>> gather([first, second], "cpu", sizes=[2, 1])
        {'y': tensor([1, 2, 3]), 'loss': 2.0, 'count': tensor(3)}
        >>> gather([first, second], "cpu", scalars="stack", overrides={"loss": "list"})
        {'y': tensor([1, 2, 3]), 'loss': [1.0, 4.0], 'count': tensor([2, 1])}
    """
    check_choice("scalars", scalars, get_args(Scalars))
    check_overrides(overrides)
    device = resolve_devices([minus_one_is_cpu(output_device)])[0]
    sizes = _own_sizes(outputs, dim) if sizes is None else tuple(sizes)
    is_known, sizes = bool(sizes), sizes or (1,) * len(outputs)
    if len(sizes) != len(outputs):
        raise ValueError(
            f"sizes: expected {len(outputs)} numbers, one per output, got {len(sizes)}: {sizes}. "
            "Give the size of every shard of which there is an output."
        )
    rules = RowRules(dim, overrides or {})
    return Join(sizes, device, rules, scalars, sizes_are_known=is_known).gather(outputs)


def check_overrides(overrides: Mapping[str, Override] | None, option: str = "overrides") -> None:
    """Raises a ValueError, which names the option, unless it maps keys to `Override`."""
    if overrides is not None and not isinstance(overrides, Mapping):
        raise expected(option, "a mapping such as {'loss': 'mean'}", overrides, "Write one.")
    for key, override in (overrides or {}).items():
        if not isinstance(key, str) or not (callable(override) or is_choice(override, OVERRIDES)):
            name, known = f"{option}[{short_repr(key)}]", sorted(OVERRIDES)
            wanted = f"a key or dotted path, and one of {known}, pad(value) or a function"
            raise expected(name, wanted, override, "Correct it, or leave it out.")


def _own_sizes(outputs: Sequence[Any], dim: int) -> Sizes:
    """The outputs' own batch sizes, 0 for None; () unless all others have one."""
    sizes = []
    for output in outputs:
        try:
            size, reading = (0, "flat") if output is None else infer_batch_size(output, dim)
        except BatchSizeError:
            return ()
        if output is not None and (not size or (reading, type(output)) == ("samples", tuple)):
            return ()
        sizes.append(size or 0)
    return tuple(sizes)


def without_rows(node: Any, dim: int, n: int) -> Any:
    """Outputs of n samples without the rows of their tensors: for samples that are not to count."""

    def empty(leaf: Any) -> Any:
        has_rows = isinstance(leaf, Tensor) and size_of(leaf, dim) == n
        return leaf.narrow(dim, 0, 0) if has_rows else leaf

    return tree.map_leaves(empty, node)


@dataclass(frozen=True)
class pad:  # it reads as a function where it is used
    """For `gather_overrides`: rows that are as long as the longest of their shard.

    Tensors are padded with `value` at their ends to one shape, and joined along `dim`.

    Example:
        >>> pad(-1).padded([torch.ones(2, 1).long(), torch.zeros(1, 2).long()], 0)
        [tensor([[ 1, -1],
                [ 1, -1]]), tensor([[0, 0]])]
    """

    value: float

    def __call__(self, tensors: list[Tensor]) -> Tensor:
        """The tensors joined along their first dim."""
        return torch.cat(self.padded(tensors, 0))

    def padded(self, tensors: list[Tensor], dim: int) -> list[Tensor]:
        """The tensors, all of one shape but for `dim`."""
        shape = [max(lengths) for lengths in zip(*(t.shape for t in tensors), strict=True)]
        padded = []
        for tensor in tensors:
            more = [b - a for a, b in zip(tensor.shape, shape, strict=True)]
            more[dim] = 0
            sides = [side for n in reversed(more) for side in (0, n)]
            padded.append(torch.nn.functional.pad(tensor, sides, value=self.value))
        return padded


# --- How shapes, lengths and numbers follow the shards' sizes


def fit_shapes(
    shapes: Sequence[Sequence[int]], sizes: Sequence[int], dim: int = 0
) -> tuple[Fit, int]:
    """How the shapes of one leaf on every replica follow the shards' sizes, and along which dim.

    Returns `"rows"` and the dimension that has the sizes, or the same multiple of them; `"uneven"`
    if lengths along `dim` alone differ, and follow no sizes; `"same"` if no shape differs; else
    `"ragged"`.

    Example:
        >>> fit_shapes([(3, 2), (1, 2)], (3, 1)), fit_shapes([(3, 3)] * 2, (3, 1))
        (('rows', 0), ('same', 0))
        >>> fit_shapes([(2, 12)] * 3, (12,) * 3), fit_shapes([(24, 2)] * 3, (12,) * 3)
        (('rows', 1), ('rows', 0))
    """
    ndim = len(shapes[0])
    if any(len(shape) != ndim for shape in shapes):
        return "ragged", 0
    preferred = dim % ndim if -ndim <= dim < ndim else -1
    free = [d for d in range(ndim) if len({(*s[:d], *s[d + 1 :]) for s in shapes}) == 1]
    exact = [d for d in free if [s[d] for s in shapes] == list(sizes)]
    if preferred in free and preferred not in exact and len(exact) != 1:
        multiple = sum(s[preferred] for s in shapes) // max(sum(sizes), 1)
        if multiple and [s[preferred] for s in shapes] == [multiple * n for n in sizes]:
            return "rows", preferred
    if preferred in exact or len(exact) == 1:
        return "rows", preferred if preferred in exact else exact[0]
    if len(set(map(tuple, shapes))) == 1:
        return "same", 0
    return ("uneven", preferred) if preferred in free else ("ragged", 0)


def as_rows(tensors: list[Tensor], sizes: Sizes) -> list[Tensor]:
    """Reshapes 0-dim tensors to [1] beside 1-dim ones: `squeeze()` took the dim of one sample."""
    if len({t.dim() for t in tensors}) > 1 and all(
        tuple(t.shape) == ((n,) if t.dim() else ()) and (t.dim() or n == 1)
        for t, n in zip(tensors, sizes, strict=True)
    ):
        return [t.reshape(-1) for t in tensors]
    return tensors


def are_per_shard(numbers: Sequence[int], sizes: Sequence[int]) -> bool | None:
    """Whether integers count something in each shard, so that the batch has their sum.

    False if each describes the whole batch; None if that cannot be known, because both the numbers
    and the shards are equal.

    Example:
        >>> are_per_shard([3, 2], [3, 2]), are_per_shard([4, 4], [3, 2])
        (True, False)
    """
    if len(numbers) == 1 or len(set(numbers)) > 1:
        return True
    return False if len(set(sizes) - {0}) > 1 else None


# --- Joining


@dataclass(frozen=True)
class Join:
    """Joins the trees of several replicas, whose tensors are all on `device`.

    Attributes:
        sizes: of the shards of these replicas.
        where: what a path belongs to, the name first, for messages.
        sizes_are_known: False if `sizes` are a guess, equal shards.
    """

    sizes: Sizes
    device: torch.device
    row_rules: RowRules
    scalars: Scalars = "merge"
    where: tuple[Any, ...] = ("output",)
    sizes_are_known: bool = True

    def gather(self, outputs: Sequence[Any], path: tree.Path = ()) -> Any:
        """The outputs, which may be on any device and lie at this path, joined on `device`."""
        return self.node(to_device_together(outputs, self.device), path)

    def node(self, nodes: list[Any], path: tree.Path, override: Override | None = None) -> Any:
        """The nodes of all replicas at a path, joined; those that are None are left out."""
        present = [i for i, node in enumerate(nodes) if node is not None]
        if not present:
            return None
        if len(present) < len(nodes):
            some = replace(self, sizes=tuple(self.sizes[i] for i in present))
            return some.node([nodes[i] for i in present], path, override)
        override = override_at(path, self.row_rules.overrides) or override
        if override in ("first", "list"):
            return nodes[0] if override == "first" else nodes
        if callable(override) and not isinstance(override, pad):
            return override(nodes)
        if all(map(tree.is_list, nodes)) and (
            override == "cat"
            or (not self._has_overrides_below(path) and self.are_of_samples(nodes, path))
        ):
            return tree.of_list(nodes[0], [item for node in nodes for item in node])
        if tree.children(nodes[0]) is not None:
            return self._containers(nodes, path, override)
        if override is None:
            return self.leaves(nodes, path)
        return self._join_as(override, nodes, path)

    def are_of_samples(self, nodes: list[Any], path: tree.Path) -> bool:
        """Whether to concatenate lists: they have one item per sample, or differ in length.

        Items that all have the shard's number of rows are columns. A tuple holds samples only if it
        has one item or strings, as DataLoaders make it: steps return tuples of several values.
        """
        lengths, items = tuple(map(len, nodes)), [item for node in nodes for item in node]
        if len(nodes) == 1 or not items:
            return False
        counts = are_per_shard(lengths, self.sizes)
        if counts is not None or lengths != self.sizes:
            return bool(counts)
        rows = [
            len(item) == size
            if tree.is_list(item)
            else {size_of(leaf, self.row_rules.dim) for leaf in tree.leaves(item)} == {size}
            for node, size in zip(nodes, self.sizes, strict=True)
            for item in node
        ]
        is_tuple = all(isinstance(node, tuple) for node in nodes) and lengths[0] > 1
        are_items = not is_tuple or all(isinstance(item, str | bytes) for item in items)
        return are_items and not all(rows) and (are_alike(items) or not any(rows))

    def _has_overrides_below(self, path: tree.Path) -> bool:
        prefix = "".join(f"{getattr(key, 'name', key)}." for key in path)
        return bool(prefix) and any(key.startswith(prefix) for key in self.row_rules.overrides)

    def _containers(self, nodes: list[Any], path: tree.Path, override: Override | None) -> Any:
        if len({(type(node).__module__, tree.kind_name(node)) for node in nodes}) > 1:
            kinds = sorted(set(map(tree.kind_name, nodes)))
            self._refuse(path, "the same type from every replica", kinds)
        columns = [dict(tree.children(node) or ()) for node in nodes]
        keys = list(dict.fromkeys(key for column in columns for key in column))
        values: list[Any] = []
        counts = [column.get("num_items") for column in columns]
        for k in keys:
            parts = [column.get(k) for column in columns]
            if k in ("loss", "num_items") and self.scalars == "merge" and None not in counts:
                values.append(_of_items(parts, counts) if k == "loss" else sum(counts))
                continue
            # What is not of the batch may still be as long as a shard.
            shared = isinstance(nodes[0], Distribution) and not tree.is_of_batch(nodes[0], k)
            values.append(self.node(parts, (*path, k), "first" if shared else override))
        if all(len(column) == len(keys) for column in columns):
            return tree.rebuild(nodes[0], values)
        items = zip(keys, values, strict=True)
        return {key: value for key, value in items if not isinstance(key, tree.Attribute)}

    def leaves(self, leaves: list[Any], path: tree.Path) -> Any:
        """The leaves of all replicas at a path, joined."""
        first = leaves[0]
        if len(leaves) == 1 and (self.scalars == "merge" or not _is_scalar(first)):
            return first
        if all(isinstance(leaf, Tensor) for leaf in leaves):
            rows = as_rows(leaves, self.sizes)
            return self._merge(rows, path) if all(map(_is_scalar, rows)) else self._rows(rows, path)
        kind = leaf_type(first)
        if kind is None or any(leaf_type(leaf) is not kind for leaf in leaves):
            return self._plain(leaves, path)
        if is_array(first):
            return self._rows(leaves, path)
        # Joining makes new tensors, such as a batch of graphs has: they may be on the CPU.
        return move(kind.join(leaves, self.row_rules.dim), self.device)

    def _rows(self, leaves: list[Any], path: tree.Path) -> Any:
        """Tensors or arrays, by the rule for rows."""
        if len(leaves) == 1:
            return leaves[0]
        if any(isinstance(leaf, Tensor) and leaf.is_nested for leaf in leaves):
            return TENSORS.join(leaves, 0)
        how, dim = fit_shapes([leaf.shape for leaf in leaves], self.sizes, self.row_rules.dim)
        are_samples = tuple(leaf.shape[dim] for leaf in leaves) == self.sizes
        if how == "rows" and (are_samples or not self.sizes_are_known):
            return (leaf_type(leaves[0]) or TENSORS).join(leaves, dim)
        if all(map(partial(tree.equal, leaves[0]), leaves)):
            return leaves[0]
        if how != "ragged":
            self._refuse(path, f"one row for each of {self.sizes} samples", _shapes(leaves))
        self.row_rules.warn_once(
            (*self.where, *path),
            f"{tree.name(path, str(self.where[0]))}: {', '.join(_shapes(leaves))} of shards of "
            f"{', '.join(map(str, self.sizes))} samples do not fit together, and come as a "
            f"list. {_way_out(path)}",
        )
        return leaves

    def _merge(self, tensors: list[Tensor], path: tree.Path) -> Tensor:
        """0-dim tensors: weighted means of floats and sums of integers."""
        if self.scalars == "stack":
            return torch.stack(tensors)
        if tensors[0].is_floating_point() or tensors[0].is_complex():
            return weighted_mean(tensors, self.sizes)
        if tensors[0].dtype is not torch.bool:
            return _sum(torch.stack(tensors))
        if any(not tree.equal(tensors[0], tensor) for tensor in tensors):
            self._refuse(path, "the same bool from every replica", [t.item() for t in tensors])
        return tensors[0]

    def _plain(self, values: list[Any], path: tree.Path) -> Any:
        """Numbers, strings and whatever else is no tensor."""
        first = values[0]
        if all(type(value) is int for value in values):
            is_size = tuple(values) == self.sizes and first > 1
            return sum(values) if is_size or len(set(values)) > 1 else first
        if all(type(value) is type(first) and tree.equal(value, first) for value in values):
            return first
        if all(map(_is_number, values)):
            return _mean(values, self.sizes)
        if not all(isinstance(value, str | bytes | bool | int | float) for value in values):
            kinds = sorted({type(value).__qualname__ for value in values})
            self._refuse(path, "tensors, numbers, strings, or containers of these", kinds)
        return values

    def _join_as(self, override: Any, leaves: list[Any], path: tree.Path) -> Any:
        """Leaves joined as the user says."""
        dim, kind = self.row_rules.dim, leaf_type(leaves[0])

        def refuse(expected: str) -> NoReturn:
            self._refuse(path, f"{expected} for the override {override!r}", _shapes(leaves))

        if isinstance(override, pad):
            if not all(isinstance(x, Tensor) and x.dim() == leaves[0].dim() > 0 for x in leaves):
                self._refuse(path, "tensors of as many dims for pad(value)", _shapes(leaves))
            return self._rows(override.padded(leaves, dim), path)
        if override == "cat":
            if kind is None or any(leaf_type(leaf) is not kind for leaf in leaves):
                refuse("tensors, arrays or lists")
            if kind is TENSORS:
                leaves = [leaf if leaf.dim() else leaf.reshape(1) for leaf in leaves]
                has_dim = all(-leaf.dim() <= dim < leaf.dim() for leaf in leaves)
                if not has_dim or len({leaf.movedim(dim, 0).shape[1:] for leaf in leaves}) > 1:
                    refuse(f"shapes that differ in dim {dim} only")
            return move(kind.join(leaves, dim), self.device)
        if all(map(_is_number, leaves)) and override != "stack":
            return sum(leaves) if override == "sum" else _mean(leaves, self.sizes)
        if not all(isinstance(x, Tensor) or is_array(x) or _is_number(x) for x in leaves):
            refuse("tensors or numbers")
        tensors = [torch.as_tensor(leaf, device=self.device) for leaf in leaves]
        if len({tensor.shape for tensor in tensors}) > 1:
            refuse("tensors of one shape")
        if override == "mean":
            return weighted_mean(tensors, self.sizes)
        return torch.stack(tensors) if override == "stack" else _sum(torch.stack(tensors))

    def _refuse(self, path: tree.Path, expected: str, got: Sequence[Any]) -> NoReturn:
        raise GatherError(
            f"{tree.name(path, str(self.where[0]))}: expected {expected}, got "
            f"{', '.join(map(str, got))}. {_way_out(path)}"
        )


def override_at(path: tree.Path, overrides: Mapping[str, Override]) -> Override | None:
    """The user's override for a path: by its last key, or by all keys with dots between them."""
    keys = [str(getattr(key, "name", key)) for key in path] or [""]
    return (overrides.get(".".join(keys)) or overrides.get(keys[-1])) if overrides else None


def _way_out(path: tree.Path) -> str:
    key = getattr(path[-1], "name", path[-1]) if path else ""
    return (
        f"Say what it is in gather_overrides, such as {{{str(key)!r}: 'sum'}} (or 'mean', 'stack', "
        "'cat', 'first', 'list', pad(value), a function)."
    )


def _shapes(leaves: Sequence[Any]) -> list[str]:
    """The types of leaves, with the shapes of tensors, each once."""
    shapes = [f" of shape {tuple(x.shape)}" if hasattr(x, "shape") else "" for x in leaves]
    names = [type(x).__qualname__ + shape for x, shape in zip(leaves, shapes, strict=True)]
    return list(dict.fromkeys(names))


def _is_scalar(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not leaf.is_nested and leaf.dim() == 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _mean(values: list[Any], sizes: Sizes) -> float:
    return float(sum(v * n for v, n in zip(values, sizes, strict=True)) / sum(sizes))


def _of_items(means: list[Any], counts: Sequence[Any]) -> Any:
    """The mean over all items; one over no items is NaN, and contributes nothing."""
    pairs = [(x, float(n)) for x, n in zip(means, counts, strict=True)]
    pairs = [pair for pair in pairs if pair[1]] or [(x, 1.0) for x in means]
    return weighted_mean([x for x, _ in pairs], [n for _, n in pairs])


def _sum(stacked: Tensor) -> Tensor:
    """Of the entries of the first dim; of integers in their own dtype, of bools their number."""
    return stacked.sum(0, dtype=None if stacked.dtype is torch.bool else stacked.dtype)
