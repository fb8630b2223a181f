"""Gather: the replicas' outputs become what one device would have returned for the whole batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from lightning_dp.parallel.checks import check_choice, is_choice, short_repr
from lightning_dp.parallel.devices import DeviceLike, minus_one_is_cpu, resolve_devices
from lightning_dp.parallel.gather.join import Join, Scalars
from lightning_dp.parallel.scatter import (
    OVERRIDES,
    BatchSizeError,
    Override,
    RowRules,
    infer_batch_size,
    tree,
)
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
    | other leaves of `scatter.leaves`         | joined in their own way                       |
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
        order: for each of these outputs the positions of its samples in the batch, if these are not
            consecutive; rows of samples are brought into the batch's order.

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
    output_device = minus_one_is_cpu(output_device)
    device = output_device if output_device == _CPU else resolve_devices([output_device])[0]
    sizes = own_sizes(outputs, dim) if sizes is None else tuple(sizes)
    is_known, sizes = bool(sizes), sizes or (1,) * len(outputs)
    if len(sizes) != len(outputs):
        raise ValueError(
            f"sizes: expected {len(outputs)} numbers, one per output, got {len(sizes)}: {sizes}. "
            "Give the size of every shard of which there is an output."
        )
    rules = RowRules(dim, overrides or {})
    return Join(sizes, device, rules, scalars, order, sizes_are_known=is_known).gather(outputs)


def check_overrides(overrides: Mapping[str, Override] | None, option: str = "overrides") -> None:
    """Raises a ValueError, which names the option, unless it maps keys to `Override`."""
    if overrides is not None and not isinstance(overrides, Mapping):
        raise ValueError(
            f"{option}: expected a mapping such as {{'loss': 'mean'}}, got "
            f"{short_repr(overrides)}. Map keys or dotted paths of the outputs to how they are "
            "joined."
        )
    for key, override in (overrides or {}).items():
        if not isinstance(key, str) or not (callable(override) or is_choice(override, OVERRIDES)):
            raise ValueError(
                f"{option}[{short_repr(key)}]: expected a key or dotted path, and one of "
                f"{sorted(OVERRIDES)}, pad(value) or a function, got {short_repr(override)}. "
                "Correct it, or leave it out for gather's own rule."
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


def without_rows(node: Any, dim: int, n: int) -> Any:
    """Outputs of n samples without the rows of their tensors: for samples that are not to count."""

    def empty(leaf: Any) -> Any:
        is_long_enough = isinstance(leaf, Tensor) and -leaf.dim() <= dim < leaf.dim()
        return leaf.narrow(dim, 0, 0) if is_long_enough and leaf.shape[dim] == n else leaf

    return tree.map_leaves(empty, node)
