"""Gather: the replicas' outputs become what one device would have returned for the whole batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_dp.parallel import tree
from lightning_dp.parallel.transfer import to_device


class GatherError(ValueError):
    """The replicas' outputs do not fit together; the message names the leaf."""


def gather(
    outputs: Sequence[Any],
    output_device: torch.device,
    sizes: Sequence[int] | None = None,
    dim: int = 0,
    constants: Sequence[Any] = (),
) -> Any:
    """Joins the replicas' outputs, in shard order, on the output device.

    | leaf on every replica                   | result                                         |
    |-----------------------------------------|------------------------------------------------|
    | tensor                                  | concatenated along `dim`, or along the only    |
    |                                         | dim that counts the shards' samples            |
    | tensor without samples, equal anywhere  | that tensor                                    |
    | 0-dim floating tensor, float            | mean, weighted by shard size                   |
    | 0-dim integer tensor                    | sum                                            |
    | int: the shard's size, or not equal     | sum                                            |
    | list with one item per sample, or of    |                                                |
    | different lengths                       | joined                                         |
    | tuples and other containers             | gathered child by child                        |
    | strings and all else, equal everywhere  | that value                                     |
    | strings and all else, not equal         | list with one value per replica                |
    | tensors that differ beside `dim`        | list with one tensor per replica, all moved    |
    | None from some replicas                 | left out                                       |
    | NumPy arrays and scalars                | as tensors                                     |

    Args:
        outputs: one output per replica that worked; tensors may lie on any device.
        output_device: where the result's tensors end up.
        sizes: samples of each of these outputs; None for equal shards.
        dim: the dimension along which tensors are joined.
        constants: integers that are no counts even if they happen to equal a shard's size: what
            every replica was called with, such as the index of the batch.

    Raises:
        GatherError: the outputs have different structures.

    Example:
        >>> cpu = torch.device("cpu")
        >>> first = {"y": torch.tensor([1, 2]), "loss": 1.0}
        >>> second = {"y": torch.tensor([3]), "loss": 4.0}
        >>> gather([first, second], cpu, sizes=[2, 1])
        {'y': tensor([1, 2, 3]), 'loss': 2.0}
    """
    if len(outputs) == 1:
        return to_device(outputs[0], output_device)
    sizes = [1] * len(outputs) if sizes is None else sizes
    return _Gather(tuple(sizes), output_device, dim, tuple(constants)).node(list(outputs), ())


class _Gather:
    def __init__(
        self, sizes: tuple[int, ...], device: torch.device, dim: int, constants: tuple[Any, ...]
    ) -> None:
        self.sizes = sizes
        self.device = device
        self.dim = dim
        self.constants = constants

    def of(self, present: list[int]) -> _Gather:
        """The same for some of the replicas."""
        sizes = tuple(self.sizes[i] for i in present)
        return _Gather(sizes, self.device, self.dim, self.constants)

    def node(self, nodes: list[Any], path: tree.Path) -> Any:
        present = [i for i, node in enumerate(nodes) if node is not None]
        if len(present) < len(nodes):
            return self._without_none(nodes, present, path)
        if all(isinstance(node, Tensor) for node in nodes):
            return self._tensors(nodes)
        if all(_is_list(node) for node in nodes):
            return self._lists(nodes, path)
        if tree.children(nodes[0]) is not None:
            return self._containers(nodes, path)
        if all(_is_array(node) for node in nodes):
            return self._arrays(nodes)
        return self._plain(nodes)

    def _without_none(self, nodes: list[Any], present: list[int], path: tree.Path) -> Any:
        if not present:
            return None
        return self.of(present).node([nodes[i] for i in present], path)

    def _tensors(self, tensors: list[Tensor]) -> Tensor | list[Tensor]:
        moved = [t.to(self.device, non_blocking=True) for t in tensors]
        if all(t.dim() == 0 for t in moved):
            return self._scalars(moved)
        dims = [d for d in range(moved[0].dim()) if self._has_shards(moved, d)]
        if self.dim not in dims and all(map(partial(tree.equal, moved[0]), moved)):
            return moved[0]
        dim = self.dim if self.dim in dims or len(dims) != 1 else dims[0]
        return torch.cat(moved, dim) if _fit(moved, dim) else moved

    def _has_shards(self, tensors: list[Tensor], dim: int) -> bool:
        """Whether `dim` counts the samples of each shard."""
        return _fit(tensors, dim) and tuple(t.size(dim) for t in tensors) == self.sizes

    def _scalars(self, scalars: list[Tensor]) -> Tensor:
        if scalars[0].is_floating_point() or scalars[0].is_complex():
            return weighted_mean(scalars, self.sizes)
        return torch.stack(scalars).sum()

    def _lists(self, nodes: list[Any], path: tree.Path) -> Any:
        lengths = tuple(len(node) for node in nodes)
        is_column = lengths == self.sizes and not self._rows_inside(nodes)
        if all(isinstance(node, tuple) for node in nodes):
            is_column &= len(set(lengths)) > 1 or lengths == (1,) * len(nodes)
        if is_column or len(set(lengths)) > 1:
            joined = [to_device(item, self.device) for node in nodes for item in node]
            return type(nodes[0])(joined)
        return self._containers(nodes, path)

    def _rows_inside(self, nodes: list[Any]) -> bool:
        """Whether the items are themselves parts of a batch: `[predictions, targets]`, say."""
        return any(
            _rows(item) == size
            for node, size in zip(nodes, self.sizes, strict=True)
            for item in node
        )

    def _containers(self, nodes: list[Any], path: tree.Path) -> Any:
        columns = [dict(tree.children(node) or ()) for node in nodes]
        keys = _joint_keys(nodes, columns, path)
        if isinstance(nodes[0], Mapping) and any(len(c) != len(keys) for c in columns):
            return {k: self._where_present(columns, k, path) for k in keys}
        values = [self.node([column[k] for column in columns], (*path, k)) for k in keys]
        return tree.rebuild(nodes[0], values)

    def _where_present(self, columns: list[dict[Any, Any]], key: Any, path: tree.Path) -> Any:
        present = [i for i, column in enumerate(columns) if key in column]
        return self.of(present).node([columns[i][key] for i in present], (*path, key))

    def _plain(self, values: list[Any]) -> Any:
        first = values[0]
        is_count = type(first) is int and first not in self.constants
        if is_count and tuple(values) == self.sizes:
            return sum(values)
        if all(type(value) is type(first) and tree.equal(value, first) for value in values):
            return first
        if not all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
            return values
        if all(isinstance(v, int) for v in values):
            return sum(values)
        return sum(v * n for v, n in zip(values, self.sizes, strict=True)) / sum(self.sizes)

    def _arrays(self, arrays: list[Any]) -> Any:
        """NumPy arrays and scalars as tensors on the CPU, and back."""
        cpu = _Gather(self.sizes, torch.device("cpu"), self.dim, self.constants)
        joined = cpu._tensors([torch.as_tensor(array) for array in arrays])
        if isinstance(joined, list):
            return arrays
        return joined.numpy() if arrays[0].ndim else joined.numpy()[()]


def weighted_mean(scalars: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Sum of w_i * x_i over the sum of w_i; the x_i share one shape and device.

    Example:
        >>> weighted_mean([torch.tensor(1.0), torch.tensor(4.0)], [2, 1])
        tensor(2.)
    """
    total = float(sum(weights))
    terms = [scalar * (weight / total) for scalar, weight in zip(scalars, weights, strict=True)]
    return terms[0] if len(terms) == 1 else torch.stack(terms).sum(0)


def _rows(item: Any) -> int | None:
    if isinstance(item, Tensor):
        return item.size(0) if item.dim() else None
    return len(item) if _is_list(item) else None


def _fit(tensors: list[Tensor], dim: int) -> bool:
    """Whether tensors can be joined along `dim`."""
    shapes = [list(t.shape) for t in tensors]
    if any(not -len(shape) <= dim < len(shape) for shape in shapes):
        return False
    for shape in shapes:
        del shape[dim]
    return all(shape == shapes[0] for shape in shapes)


def _is_array(node: Any) -> bool:
    """Whether it is of numbers in NumPy, which the engine does not import."""
    return (
        type(node).__module__ == "numpy"
        and getattr(node, "dtype", None) is not None
        and (node.dtype.kind in "biufc")
    )


def _is_list(node: Any) -> bool:
    return isinstance(node, list | tuple) and not hasattr(node, "_fields")


def _joint_keys(nodes: list[Any], columns: list[dict[Any, Any]], path: tree.Path) -> list[Any]:
    kinds = {type(node) for node in nodes}
    if len(kinds) > 1:
        names = sorted(kind.__qualname__ for kind in kinds)
        raise GatherError(
            f"{_name(path)}: expected the same type from every replica, got {names}. "
            "Return the same structure for every shard."
        )
    keys = list(dict.fromkeys(key for column in columns for key in column))
    return keys


def _name(path: tree.Path) -> str:
    return tree.name(path).replace("batch", "output", 1)
