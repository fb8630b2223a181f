"""Gather: the replicas' outputs become what one device would have returned for the whole batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from lightning_dp.parallel.batch import tree
from lightning_dp.parallel.batch.join import (
    GatherError,
    Join,
    Scalars,
    join_as,
    join_leaves,
)
from lightning_dp.parallel.batch.leaves import size_of
from lightning_dp.parallel.batch.sample_dims import Override, StepDims
from lightning_dp.parallel.batch.sizes import BatchSizeError, infer_batch_size
from lightning_dp.parallel.batch.to_device import to_device_together
from lightning_dp.parallel.checks import check_choice, is_choice, told
from lightning_dp.parallel.devices import DeviceLike, minus_one_is_cpu, resolve_devices
from lightning_dp.parallel.split import Order, Sizes

_CPU = torch.device("cpu")


def gather(
    outputs: Sequence[Any],
    output_device: DeviceLike,
    dim: int = 0,
    *,
    sizes: Sequence[int] | None = None,
    scalars: Scalars = "merge",
    overrides: Mapping[str, Override] | None = None,
    order: Order | None = None,
    dims: StepDims | None = None,
    where: tuple[Any, ...] = ("output",),
    at: tree.Path = (),
    doubts_means: bool = False,
) -> Any:
    """Joins the replicas' outputs, in shard order, on the output device.

    | leaf on every replica                   | result                                         |
    |-----------------------------------------|------------------------------------------------|
    | tensor, NumPy array                     | concatenated along the dim that follows the    |
    |                                         | shards' sizes; with equal shards, along the    |
    |                                         | one that did before, or else `dim`             |
    | the same, of different lengths in `dim` | concatenated, with a warning                   |
    | the same that follows no sizes          | that tensor, if equal; else, with a warning,   |
    |                                         | merged as 0-dim tensors are                    |
    | the same, differing beside `dim`        | list with one per replica, with a warning      |
    | 0-dim floating tensor, float            | mean, weighted by shard size                   |
    | 0-dim integer tensor                    | sum, of the same dtype                         |
    | 0-dim bool tensor                       | that bool, if equal; else an error             |
    | 0-dim tensor, with `scalars="stack"`    | stacked to shape [K]                           |
    | int: the shard's size, or not equal,    | sum                                            |
    | now or before                           |                                                |
    | list with one item per sample, tuple    |                                                |
    | with one string per sample; either, of  |                                                |
    | different lengths                       | joined                                         |
    | dicts and other mappings, tuples, named | gathered child by child; keys that some        |
    | tuples, dataclasses, other lists        | replicas lack, from those that have them, into |
    |                                         | a dict                                         |
    | packed sequences, graphs, TensorDicts,  |                                                |
    | objects whose class has `cat`           | joined in their own way, see `leaves`          |
    | strings, bools and all else, equal      | that value                                     |
    | strings, bools and all else, not equal  | list with one value per replica                |
    | None from some replicas                 | left out                                       |

    Tensors cross in few copies per source device and dtype, asynchronously, and those with a graph
    one by one; on return they can be read, also on the CPU. Differentiable.

    Args:
        outputs: one output per replica, whose tensors may lie on any device; None for a replica
            without samples, which is left out together with its size.
        output_device: where the result's tensors end up, as `torch.device`, name or id; it may
            be any device; -1 is the CPU, as for `torch.nn.parallel.gather`.
        dim: the dimension along which tensors are joined.
        sizes: samples of each of these outputs. None: the outputs' own batch sizes if all have
            one, else equal shards.
        scalars: `"merge"` for the table's means and sums of 0-dim tensors, `"stack"` for one value
            per replica, as `torch.nn.DataParallel` gives (also of one replica). Python's numbers
            are merged in either case.
        overrides: how to join what has a certain key or field name, at any depth, or lies at a
            dotted path such as `"aux.count"` (`""` is the output itself, `"0"` the first of a
            tuple), in the place of the table: `"mean"` (weighted by
            shard size), `"sum"`, `"stack"` (along a new first dim), `"cat"`, `"first"` (the first
            replica's) or `"list"` (one per replica). For a container it holds for all that is
            in it.
        order: for each of these outputs the positions of its samples in the batch, if the batch
            was cut in another order than its own; what has one row or item per sample is brought
            into the batch's order.
        dims: what is known of this kind of step, which learns from it; None for what these outputs
            say alone.
        where: what the outputs are, for messages and for what is known.
        at: their path in it.
        doubts_means: whether a float that is averaged, and is not plainly a loss, is warned of.

    Raises:
        GatherError: the outputs have different structures, bools differ, or an override is not
            possible.
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
    output_device = minus_one_is_cpu(output_device)
    device = output_device if output_device == _CPU else resolve_devices([output_device])[0]
    sizes = own_sizes(outputs, dim) if sizes is None else tuple(sizes)
    sizes = sizes or (1,) * len(outputs)
    if len(sizes) != len(outputs):
        raise ValueError(
            f"sizes: expected {len(outputs)} numbers, one per output, got {len(sizes)}: {sizes}. "
            "Give the size of every shard of which there is an output."
        )
    dims = dims or StepDims(dim, overrides, is_told=True)
    rules = Join(sizes, scalars, device, dims, where, order, doubts_means=doubts_means)
    return TreeJoin(rules).node(to_device_together(outputs, device), at)


@dataclasses.dataclass(frozen=True)
class TreeJoin:
    """Walks the trees of all replicas at once; their tensors are on one device."""

    rules: Join

    def node(self, nodes: list[Any], path: tree.Path, override: Override | None = None) -> Any:
        """The nodes of all replicas at a path, joined."""
        present = [i for i, node in enumerate(nodes) if node is not None]
        if len(present) < len(nodes):
            kept = [nodes[i] for i in present]
            join = dataclasses.replace(self, rules=self.rules.of(present))
            return join.node(kept, path, override) if present else None
        override = override_at(path, self.rules.dims.overrides) or override
        if override in ("first", "list"):
            return nodes[0] if override == "first" else nodes
        if all(tree.is_list(node) for node in nodes):
            return self._lists(nodes, path, override)
        if tree.children(nodes[0]) is not None:
            return self._containers(nodes, path, override)
        if override is not None:
            return join_as(override, nodes, self.rules, path)
        return self.leaves(nodes, path)

    def leaves(self, leaves: list[Any], path: tree.Path) -> Any:
        """The leaves of all replicas at a path, joined."""
        return join_leaves(leaves, self.rules, path)

    def _lists(self, nodes: list[Any], path: tree.Path, override: Override | None) -> Any:
        if override == "cat" or self.are_of_samples(nodes, path):
            joined = type(nodes[0])([item for node in nodes for item in node])
            return self.rules.in_order(joined, [len(node) for node in nodes], 0)
        return self._containers(nodes, path, override)

    def are_of_samples(self, nodes: list[Any], path: tree.Path) -> bool:
        """Whether lists have one item per sample, or in any case no items that correspond."""
        lengths = tuple(len(node) for node in nodes)
        if len(nodes) == 1 or not any(lengths):
            return False
        counts = self.rules.counts(lengths, path)
        if counts is not None or lengths != self.rules.sizes or self._are_parts(nodes):
            return bool(counts)
        items = [item for node in nodes for item in node]
        is_tuple = all(isinstance(node, tuple) for node in nodes)
        # Steps return tuples of several values, and the tuples of names that DataLoaders make.
        is_list = not is_tuple or lengths[0] == 1 or all(isinstance(i, str | bytes) for i in items)
        if is_list:
            text = f"{lengths[0]} items on every replica are taken for one per sample"
            self.rules.say(path, text, is_guess=True)
        return is_list

    def _are_parts(self, nodes: list[Any]) -> bool:
        """Whether the items are themselves parts of a batch: `[predictions, targets]`, say."""
        items = [item for node in nodes for item in node]
        pairs = zip(nodes, self.rules.sizes, strict=True)
        have_rows = [
            (len(i) if tree.is_list(i) else size_of(i, self.rules.dim)) == size
            for node, size in pairs
            for i in node
        ]
        are_alike = all(isinstance(i, Tensor) and i.shape[1:] == items[0].shape[1:] for i in items)
        return any(have_rows) and (all(have_rows) or not are_alike)

    def _containers(self, nodes: list[Any], path: tree.Path, override: Override | None) -> Any:
        kinds = {type(node) for node in nodes}
        if len(kinds) > 1 and len(set(map(tree.kind, nodes))) > 1:
            names = sorted(set(map(tree.kind_name, nodes)))
            raise GatherError(
                f"{self.rules.name(path)}: expected the same type from every replica, got "
                f"{names}. Return the same structure for every shard."
            )
        columns = [dict(tree.children(node) or ()) for node in nodes]
        keys = list(dict.fromkeys(key for column in columns for key in column))
        values = [self.node([c.get(k) for c in columns], (*path, k), override) for k in keys]
        if all(len(column) == len(keys) for column in columns):
            return tree.rebuild(nodes[0], values)
        items = zip(keys, values, strict=True)
        return {key: value for key, value in items if not isinstance(key, tree.Attribute)}


def override_at(path: tree.Path, overrides: Mapping[str, Override]) -> Override | None:
    """What the user says of a path."""
    if not overrides:
        return None
    if not path:
        return overrides.get("")
    keys = [k.name if isinstance(k, tree.Attribute) else str(k) for k in path]
    return overrides.get(".".join(keys)) or overrides.get(keys[-1])


def check_overrides(overrides: Mapping[str, str] | None, option: str = "overrides") -> None:
    """Raises a ValueError, which names the option, unless it maps keys to `Override`."""
    if overrides is not None and not isinstance(overrides, Mapping):
        raise ValueError(
            f"{option}: expected a mapping such as {{'loss': 'mean'}}, got {told(overrides)}. "
            "Map keys or dotted paths of the outputs to how they are joined."
        )
    for key, override in (overrides or {}).items():
        if not isinstance(key, str) or not is_choice(override, get_args(Override)):
            raise ValueError(
                f"{option}[{told(key)}]: expected a key or dotted path, and one of "
                f"{sorted(get_args(Override))}, got {told(override)}. Correct it, or leave it out "
                "for gather's own rule."
            )


def own_sizes(outputs: Sequence[Any], dim: int) -> Sizes:
    """The outputs' own batch sizes, 0 for None; () unless all others have one."""
    sizes = tuple(0 if output is None else _own_size(output, dim) for output in outputs)
    is_known = all(size or output is None for size, output in zip(sizes, outputs, strict=True))
    return sizes if is_known else ()


def _own_size(output: Any, dim: int) -> int:
    try:
        size, reading = infer_batch_size(output, dim)
    except BatchSizeError:
        return 0
    return 0 if size is None or (reading == "samples" and isinstance(output, tuple)) else size
