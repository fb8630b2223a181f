"""How the leaves of all replicas become one: the rules of gather's table, and its overrides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from lightning_dp.parallel.batch import tree
from lightning_dp.parallel.batch.leaves import TENSORS, Kind, is_array, kind_of, move, pick
from lightning_dp.parallel.batch.sample_dims import Override, StepDims, Verdict, multiple_of
from lightning_dp.parallel.batch.shards import weighted_mean
from lightning_dp.parallel.split import Order, Sizes, batch_order

Scalars: TypeAlias = Literal["merge", "stack"]


class GatherError(ValueError):
    """The replicas' outputs do not fit together; the message names the leaf."""


@dataclass(frozen=True)
class Join:
    """What the rules depend on, as the arguments of `gather` give it.

    `sizes` and `order` are those of the replicas that have the leaf; `where` is what its path
    belongs to, the name first; `warns` is whether a choice is said, and `doubts_means` whether it
    is one to average a float.
    """

    sizes: Sizes
    scalars: Scalars
    device: torch.device
    dims: StepDims
    where: tuple[Any, ...] = ("output",)
    order: Order | None = None
    warns: bool = True
    doubts_means: bool = False

    @property
    def dim(self) -> int:
        """Along which batches are cut."""
        return self.dims.dim

    def of(self, present: Sequence[int]) -> Join:
        """The same for some of the replicas."""
        sizes = tuple(self.sizes[i] for i in present)
        order = None if self.order is None else [self.order[i] for i in present]
        return replace(self, sizes=sizes, order=order)

    def name(self, path: tree.Path) -> str:
        """A path as one would write it in Python."""
        return tree.name(path, str(self.where[0]))

    def rows(self, leaves: Sequence[Any], path: tree.Path) -> Verdict:
        """How tensors or arrays belong together; learns from it."""
        shapes = [tuple(leaf.shape) for leaf in leaves]
        return self.dims.rows((*self.where, *path), shapes, self.sizes)

    def counts(self, numbers: Sequence[int], path: tree.Path) -> bool | None:
        """Whether numbers add up; learns from it."""
        name = self.name(path) if self.warns else ""
        return self.dims.counts((*self.where, *path), numbers, self.sizes, name)

    def say(
        self, path: tree.Path, text: str, leaves: Sequence[Any] = (), *, is_guess: bool = False
    ) -> None:
        """Warns once about a path, and names the way out.

        A guess is what only the numbers at hand say. It is none if the caller said it, and no
        warning for shards of one sample each, which hardly leave a choice.
        """
        if not self.warns or (is_guess and self.dims.is_told):
            return
        if leaves:
            shapes = ", ".join(dict.fromkeys(str(tuple(leaf.shape)) for leaf in leaves))
            text = f"{shapes} of shards of {', '.join(map(str, self.sizes))} samples {text}"
        key = getattr(path[-1], "name", path[-1]) if path else ""
        self.dims.say(
            (*self.where, *path),
            f"{self.name(path)}: {text}. Say what it is in gather_overrides, "
            f"such as {{{str(key)!r}: 'sum'}} (or 'mean', 'stack', 'cat', 'first', 'list').",
            quietly=is_guess and set(self.sizes) == {1},
        )

    def in_order(self, joined: Any, lengths: Sequence[int], dim: int) -> Any:
        """Brings joined shards of these lengths into the batch's order, if they are of samples."""
        places = None if self.order is None else batch_order(self.order)
        multiple = multiple_of(lengths, self.sizes)
        if places is None or multiple is None:
            return joined
        places = [place * multiple + i for place in places for i in range(multiple)]
        if tree.is_list(joined):
            return type(joined)([joined[i] for i in places])
        return pick(joined, places, dim)


def join_leaves(leaves: list[Any], rules: Join, path: tree.Path) -> Any:
    """What gather's table says of the leaves that all replicas have at a path."""
    if rules.doubts_means and rules.scalars == "merge":
        _doubt_mean(leaves, rules, path)
    if all(isinstance(leaf, Tensor) for leaf in leaves):
        return _join_tensors(leaves, rules, path)
    if len(leaves) == 1:
        return leaves[0]
    kind = kind_of(leaves[0])
    if kind is None and all(map(is_array, leaves)):
        return _join_numbers(leaves, rules, path)
    if kind is None or any(kind_of(leaf) is not kind for leaf in leaves):
        return _join_plain(leaves, rules, path)
    if is_array(leaves[0]):
        return _join_rows(leaves, rules, path, kind)
    # Joining makes new tensors, such as a batch of graphs has: they may be on the CPU.
    joined = move(kind.join(leaves, rules.dim), rules.device)
    return rules.in_order(joined, [kind.size(x, rules.dim) or 0 for x in leaves], rules.dim)


def _join_tensors(tensors: list[Tensor], rules: Join, path: tree.Path) -> Any:
    if any(t.is_nested or t.dim() for t in tensors):
        rows = as_rows(tensors, rules.sizes)
        return _join_rows(rows, rules, path, kind_of(rows[0]) or TENSORS)
    if rules.scalars == "stack":
        return torch.cat([scalar.reshape(1) for scalar in tensors])
    return tensors[0] if len(tensors) == 1 else _merge(tensors, rules, path)


def as_rows(tensors: list[Tensor], sizes: Sizes) -> list[Tensor]:
    """Where some replicas have one number per sample, a `squeeze` took the dim of one sample."""
    dims = [t.dim() for t in tensors]
    shapes = [(n,) if dim else () for dim, n in zip(dims, sizes, strict=True)]
    if not any(dims) or all(dims) or [tuple(t.shape) for t in tensors] != shapes:
        return tensors
    are_single = all(n == 1 for dim, n in zip(dims, sizes, strict=True) if dim == 0)
    return [t.reshape(-1) for t in tensors] if are_single else tensors


def _doubt_mean(leaves: list[Any], rules: Join, path: tree.Path) -> None:
    """What is averaged beside a loss may be a sum: it is said, unless it is a constant."""
    is_loss = path in ((), (0,)) or path[-1] == "loss"
    if is_loss or not all(map(_is_float, leaves)) or not rules.dims.looks_at((*rules.where, *path)):
        return
    if not all(map(partial(tree.equal, leaves[0]), leaves)):
        rules.say(
            path, "may be a mean or a sum over samples; it is averaged, weighted by their number"
        )


def _is_float(leaf: Any) -> bool:
    if isinstance(leaf, Tensor):
        return leaf.dim() == 0 and (leaf.is_floating_point() or leaf.is_complex())
    return isinstance(leaf, float)


def _join_numbers(scalars: list[Any], rules: Join, path: tree.Path) -> Any:
    """NumPy's scalars and 0-dim arrays."""
    if any(scalar.ndim or scalar.dtype.kind not in "biufc" for scalar in scalars):
        return _join_plain(scalars, rules, path)
    return _merge([torch.as_tensor(scalar) for scalar in scalars], rules, path).numpy()[()]


def _join_plain(values: list[Any], rules: Join, path: tree.Path) -> Any:
    """Joins numbers, strings and whatever else is no tensor."""
    first = values[0]
    if all(type(value) is int for value in values):
        counts = rules.counts(values, path)
        if counts is None and tuple(values) == rules.sizes:
            counts = True
            rules.say(path, f"{first} is taken for each shard's number of samples", is_guess=True)
        return sum(values) if counts else first
    if all(type(value) is type(first) and tree.equal(value, first) for value in values):
        return first
    if not all(_is_number(value) for value in values):
        return values
    return _mean(values, rules.sizes)


def join_as(override: Override, leaves: list[Any], rules: Join, path: tree.Path) -> Any:
    """Joins leaves as the user says, or raises a GatherError where that has no meaning."""
    name = rules.name(path)
    if override == "cat":
        return _concatenate(leaves, rules, name)
    if all(_is_number(leaf) for leaf in leaves) and override != "stack":
        return sum(leaves) if override == "sum" else _mean(leaves, rules.sizes)
    if not all(isinstance(leaf, Tensor) or is_array(leaf) or _is_number(leaf) for leaf in leaves):
        raise _cannot(override, "tensors or numbers", leaves, name)
    tensors = [torch.as_tensor(leaf, device=rules.device) for leaf in leaves]
    if len({tensor.shape for tensor in tensors}) > 1:
        raise _cannot(override, "tensors of one shape", leaves, name)
    if override == "mean":
        return weighted_mean(tensors, rules.sizes)
    stacked = torch.stack(tensors)
    return stacked if override == "stack" else _sum(stacked)


def _merge(tensors: list[Tensor], rules: Join, path: tree.Path) -> Tensor:
    """Of tensors that have no samples: the mean of floats, weighted by shard size; sums of ints.

    Bools that are equal stay what they are. Whether one device would have asked for all or for any
    of those that are not, nothing tells.
    """
    if tensors[0].is_floating_point() or tensors[0].is_complex():
        return weighted_mean(tensors, rules.sizes)
    if tensors[0].dtype is not torch.bool:
        return _sum(torch.stack(tensors))
    if any(not tree.equal(tensors[0], tensor) for tensor in tensors):
        got = [tensor.tolist() for tensor in tensors][:4]
        raise GatherError(
            f"{rules.name(path)}: expected the same bool from every replica, got {got}: all or any "
            "of them may be meant. Return a number, such as a mean, or say what it is in "
            "gather_overrides ('stack', 'first' or 'list')."
        )
    return tensors[0]


def _sum(stacked: Tensor) -> Tensor:
    """Of the entries of the first dim; of integers in their own dtype, of bools their number."""
    return stacked.sum(0, dtype=None if stacked.dtype is torch.bool else stacked.dtype)


def _join_rows(leaves: list[Any], rules: Join, path: tree.Path, kind: Kind) -> Any:
    """Tensors or arrays, along the dim that counts the shards' samples."""
    if len(leaves) == 1:
        return leaves[0]
    if any(isinstance(leaf, Tensor) and leaf.is_nested for leaf in leaves):
        return leaves
    how, dim, multiple, is_sure = rules.rows(leaves, path)
    if how == "constant":
        return _join_constants(leaves, rules, path)
    if how == "ragged":
        rules.say(path, "do not fit together, and come as a list", leaves)
        return leaves
    cats = f"concatenated along dim {dim}, in the order of the shards: right if"
    if how == "varies":
        text = f"do not follow these, and are {cats} each row belongs to a sample, in that order"
        rules.say(path, text, leaves)
    elif multiple > 1:
        text = f"have {multiple} rows for each, and are {cats} the rows of a sample are together"
        rules.say(path, text, leaves, is_guess=True)
    elif not is_sure:
        rules.say(path, f"are {cats} that dim counts samples", leaves, is_guess=True)
    return rules.in_order(kind.join(leaves, dim), [leaf.shape[dim] for leaf in leaves], dim)


def _join_constants(leaves: list[Any], rules: Join, path: tree.Path) -> Any:
    """What follows no sizes has no samples: it is merged as 0-dim tensors are."""
    first = leaves[0]
    if all(map(partial(tree.equal, first), leaves)):
        return first
    tensors = [torch.as_tensor(leaf) for leaf in leaves]
    if rules.scalars == "stack":
        how, merged = "stacked", torch.stack(tensors)
    else:
        is_mean = tensors[0].is_floating_point() or tensors[0].is_complex()
        how = "averaged, weighted by shard size" if is_mean else "added up"
        merged = _merge(tensors, rules, path)
    rules.say(path, f"do not follow these: no rows of samples, so they are {how}", leaves)
    return merged if isinstance(first, Tensor) else merged.numpy()


def _concatenate(leaves: list[Any], rules: Join, name: str) -> Any:
    if all(isinstance(leaf, Tensor) for leaf in leaves):
        rows = [leaf if leaf.dim() else leaf.reshape(1) for leaf in leaves]
        has_dim = all(-row.dim() <= rules.dim < row.dim() for row in rows)
        if not has_dim or len({row.movedim(rules.dim, 0).shape[1:] for row in rows}) > 1:
            raise _cannot("cat", f"shapes that differ in dim {rules.dim} only", leaves, name)
        return (kind_of(rows[0]) or TENSORS).join(rows, rules.dim)
    kind = kind_of(leaves[0])
    if kind is None or any(kind_of(leaf) is not kind for leaf in leaves):
        raise _cannot("cat", "tensors, arrays or lists", leaves, name)
    return move(kind.join(leaves, rules.dim), rules.device)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _mean(values: list[Any], sizes: Sizes) -> float:
    return float(sum(v * n for v, n in zip(values, sizes, strict=True)) / sum(sizes))


def _cannot(override: str, expected: str, leaves: list[Any], name: str) -> GatherError:
    shapes = [getattr(leaf, "shape", None) for leaf in leaves]
    got = ", ".join(
        type(leaf).__qualname__ + ("" if shape is None else f" of shape {tuple(shape)}")
        for leaf, shape in zip(leaves, shapes, strict=True)
    )
    return GatherError(
        f"{name}: expected {expected} for the override {override!r}, got {got}. "
        "Choose another override, such as 'list', or return what it can join."
    )
