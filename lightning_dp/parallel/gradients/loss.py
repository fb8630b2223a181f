"""Loss: the replicas' losses become one loss, whose backward is theirs.

The joint loss is sum(w_i * loss_i), so its gradient is the weighted sum of the replicas'.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

LossReduction: TypeAlias = Literal["mean", "sum"]
LOSS_REDUCTIONS: tuple[LossReduction, ...] = ("mean", "sum")


@dataclass(frozen=True)
class Graph:
    """The graph of one replica.

    Attributes:
        replica: the number of the replica.
        loss: its loss, of one element.
        weight: of that in the joint loss.
    """

    replica: int
    loss: Tensor
    weight: float


@dataclass(frozen=True)
class StepOutput:
    """What `training_step` returned on one replica.

    Attributes:
        loss: one number, with its graph.
        num_items: what the loss is a mean over, where that is not samples; else None. An entry of
            a returned mapping, or an attribute of the loss.
        extras: the other entries of a returned mapping; None if a bare loss was returned.
    """

    loss: Tensor
    num_items: float | None
    extras: dict[str, Any] | None

    _KEYS: ClassVar[tuple[str, ...]] = ("loss", "num_items")

    @classmethod
    def parse(cls, output: Any) -> StepOutput:
        """Takes a step's output apart.

        Raises:
            TypeError: it is neither a tensor nor a mapping with a tensor under "loss", or
                `num_items` is no number.
            ValueError: the loss has more than one element.
        """
        is_mapping = isinstance(output, Mapping)
        loss = output.get("loss") if is_mapping else output
        if not isinstance(loss, Tensor):
            got = f"a mapping with keys {list(output)}" if is_mapping else type(output).__qualname__
            raise TypeError(
                "Expected training_step to return a loss tensor, a mapping with one under 'loss', "
                f"or None, got {got}. Return the loss of the samples in the batch."
            )
        if loss.numel() != 1:
            raise ValueError(
                f"Expected a loss of one element, got shape {tuple(loss.shape)}. "
                "Take its mean over the samples."
            )
        if not is_mapping:
            return cls(loss, items_of(loss), None)
        items = items_of(loss) if (told := output.get("num_items")) is None else _count(told)
        return cls(loss, items, {k: v for k, v in output.items() if k not in cls._KEYS})


def loss_of(output: Any) -> Tensor | None:
    """The joint loss in what a training step returned."""
    loss: Tensor | None = output["loss"] if isinstance(output, Mapping) else output
    return loss


def items_of(loss: Tensor) -> float | None:
    """What a loss is a mean over, if its attribute `num_items` tells: a number or a tensor.

    Raises:
        TypeError: it is something else.
    """
    items = getattr(loss, "num_items", None)
    return None if items is None else _count(items)


def _count(items: Any) -> float:
    value = items.item() if isinstance(items, Tensor) and items.numel() == 1 else items
    if not isinstance(value, int | float):
        got = tuple(items.shape) if isinstance(items, Tensor) else type(items).__qualname__
        raise TypeError(
            f"Expected num_items to be a number or a tensor of one element, got {got}. Give the "
            "number of items that the loss is a mean over."
        )
    return value


def agreed_items(counts: Sequence[float | None]) -> list[float] | None:
    """The replicas' item counts, or None where the losses are means over samples.

    Raises:
        ValueError: some replicas gave a count and others did not, or one is negative.
    """
    known = [count for count in counts if count is not None]
    if not known:
        return None
    if len(known) < len(counts) or min(known) < 0:
        raise ValueError(
            f"Expected num_items of at least 0 from every replica, got {list(counts)}. Give it for "
            "every shard: the number of items that the loss is a mean over."
        )
    return known


def loss_weights(
    sizes: Sequence[int], reduction: LossReduction, num_items: Sequence[float] | None = None
) -> list[float]:
    """The weight of each replica's loss in the joint loss.

    Args:
        sizes: samples of each replica that returned a loss.
        reduction: `"mean"` if the step's loss is a mean over its samples: n_i / sum(n);
            `"sum"` if it is a sum: 1.
        num_items: what the means are over, where that is not samples (valid tokens, say); these
            counts then take the place of `sizes`. If all are 0, every mean is over nothing, and
            so is theirs: the weights are those of the samples.

    Example:
        >>> loss_weights([3, 1], "mean"), loss_weights([3, 1], "mean", num_items=[0, 7])
        ([0.75, 0.25], [0.0, 1.0])
    """
    if reduction == "sum":
        return [1.0] * len(sizes)
    counts = num_items if num_items is not None and any(num_items) else sizes
    total = sum(counts)
    return [count / total for count in counts]


def join_losses(graphs: Sequence[Graph], output_device: torch.device) -> Tensor:
    """sum(w_i * loss_i) on the output device, attached to the graphs of all replicas.

    A loss of weight 0 is left out: it contributes nothing, even if it is NaN.

    Example:
        >>> graphs = [Graph(0, torch.tensor(1.0), 1.0), Graph(1, torch.tensor(float("nan")), 0.0)]
        >>> join_losses(graphs, torch.device("cpu"))
        tensor(1.)
    """
    counting = [graph for graph in graphs if graph.weight != 0]
    moved = [graph.loss.to(output_device, non_blocking=True) for graph in counting]
    joint = moved[0] * counting[0].weight
    for loss, graph in zip(moved[1:], counting[1:], strict=True):
        joint = joint.add(loss, alpha=graph.weight)
    return joint
