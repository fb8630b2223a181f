"""Collectives that a step may call: what one device would have with the whole batch.

In a replica each waits in a rendezvous of `executor` for all replicas with samples; an error names
those that have ended their calls or are at another collective. Outside of replicas they return
their argument, as on one device. Gradients flow through: one replica's graph continues in the
others, and the step's backward runs through all. Steps of several processes refuse them by name.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from lightning_dp.parallel.apply.executor import Calls, current_participant
from lightning_dp.parallel.gather import gather
from lightning_dp.parallel.scatter import move, to_device, tree, weighted_mean
from lightning_dp.parallel.torch_private import backward_id

T = TypeVar("T")

_OPS: dict[str, Callable[..., Any]] = {
    "sum": torch.sum,
    "product": torch.prod,
    "min": torch.amin,
    "max": torch.amax,
}


def all_gather(x: T) -> T:
    """The batch's `x`, a tensor or a container of tensors: joined as a step's outputs are.

    Tensors with a row for each sample are concatenated in the order of the batch, 0-dim floating
    tensors become their mean weighted by shard size. See `gather`.
    """

    def join(calls: Calls, values: list[Any]) -> Any:
        device = calls.participants[0].device
        return gather(values, device, dim=calls.dim, sizes=calls.sizes)

    return exchange("all_gather", x, join)


def reduce(x: T, op: Any = "mean") -> T:
    """The replicas' tensors of one shape in one.

    `op` is `"mean"` (or `"avg"`), weighted by shard size: of the shards' means it makes that of the
    batch; `"sum"`, `"min"`, `"max"` or `"product"`; or a `torch.distributed.ReduceOp`.
    """
    name = op_name(op)

    def join(calls: Calls, values: list[Any]) -> Tensor:
        tensors = to_device(values, calls.participants[0].device)
        return reduced(name, tensors, calls.sizes or [1] * len(tensors))

    return exchange(f"reduce with op={name!r}", x, join)


def op_name(op: Any) -> str:
    """What a reduction is called here; raises a ValueError for one that there is not."""
    name = (op if isinstance(op, str) else str(op).rsplit(".", 1)[-1]).lower()
    name = {"avg": "mean", "prod": "product"}.get(name, name)
    if name != "mean" and name not in _OPS:
        raise ValueError(
            f"reduce: expected op 'mean', 'sum', 'min', 'max' or 'product', got {op!r}."
        )
    return name


def reduced(name: str, tensors: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Tensors of one shape in one of their dtype, where `sizes` weight a mean."""
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if len(set(shapes)) > 1:
        raise ValueError(
            f"Expected tensors of one shape to reduce, got {shapes}. Use all_gather for those "
            "that have a row for each sample."
        )
    if name == "mean":
        exact = [t if t.is_floating_point() or t.is_complex() else t.double() for t in tensors]
        return weighted_mean(exact, list(map(float, sizes))).to(tensors[0].dtype)
    return cast(Tensor, _OPS[name](torch.stack([*tensors]), 0).to(tensors[0].dtype))


def broadcast(x: T, src: int = 0) -> T:
    """The `x` of one replica, counted among those that have samples, in all of them.

    Objects in it that are neither tensors nor containers of tensors are shared.
    """

    def join(calls: Calls, values: list[Any]) -> Any:
        if not 0 <= src < len(values):
            raise ValueError(
                f"broadcast: expected src from 0 to {len(values) - 1}, one of the {len(values)} "
                f"replicas that have samples, got {src}."
            )
        return values[src]

    return exchange(f"broadcast from {src}", x, join)


def barrier(name: str | None = None) -> None:
    """Waits for all replicas; `name` is for the error if one does not come."""
    what = "barrier" if name is None else f"barrier {name!r}"
    exchange(what, None, lambda calls, values: None)


def decide(decision: bool, *, everybody: bool = True) -> bool:
    """Whether all replicas, or with `everybody=False` any of them, decide so."""
    rule = all if everybody else any
    return exchange("reduce_boolean_decision", bool(decision), lambda calls, values: rule(values))


# What they share


def exchange(what: str, x: T, join: Callable[[Calls, list[Any]], Any]) -> T:
    """What `join` makes of the replicas' `x`, in every replica; `x` if there are no others.

    `join` is called once, with values that are linked to the graphs of other replicas. Each replica
    gets tensors of its own, on its device.
    """
    if not must_meet(what):
        return x

    def act(calls: Calls, values: list[Any]) -> list[Any]:
        result = join(calls, [_link(calls, value) for value in values])
        return [_own(result, task.device) for task in calls.participants]

    return cast(T, cast(Any, current_participant()).meet(what, x, act))


def must_meet(what: str) -> bool:
    """Whether the collective `what`, called here, has other replicas to wait for."""
    participant = current_participant()
    if participant is None:
        if backward_id() >= 0:
            raise RuntimeError(
                f"Expected {what} outside of a backward, got it inside: an activation checkpoint "
                "recomputes the part of the step that calls it, where the replicas do not meet. "
                "Leave this part out of the checkpoint."
            )
        return False
    participant.calls.check()
    if participant.calls.world is not None:
        raise RuntimeError(
            f"Expected no {what} in a step of several processes, got one: a step may look at the "
            "samples of its own process alone. Use one process, which can have all devices of the "
            "machine, or Lightning's strategy='ddp'."
        )
    return len(participant.calls.participants) > 1


def _own(node: Any, device: torch.device) -> Any:
    """A copy for one replica, on its device."""

    def own(leaf: Any) -> Any:
        moved = move(leaf, device)
        return moved.clone() if moved is leaf and isinstance(leaf, Tensor) else moved

    return tree.map_leaves(own, node)


def _link(calls: Calls, node: Any) -> Any:
    """Prepares a replica's tensors for the graphs of other replicas."""

    def linked(leaf: Any) -> Any:
        if not (isinstance(leaf, Tensor) and leaf.requires_grad and torch.is_grad_enabled()):
            return leaf
        calls.crossed = True
        return _linked(leaf, calls)

    return tree.map_leaves(linked, node)


class _Link(torch.autograd.Function):
    """Where the graph of a replica continues in others."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, calls: Calls) -> Tensor:
        ctx.calls = weakref.ref(calls)  # a graph that reaches the calls would never be freed
        ctx.set_materialize_grads(False)  # None stays None
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None]:
        calls = ctx.calls()
        if calls is not None and calls.is_open:
            raise RuntimeError(
                "Expected no backward and no torch.autograd.grad through a collective, or batch "
                "norm with sync_batchnorm=True, inside of training_step: other replicas are part "
                "of this graph, and their losses are not there yet. Return the loss, or use "
                'DataParallelStrategy(mode="forward").'
            )
        return gradient, None


_linked: Callable[[Tensor, Calls], Tensor] = _Link.apply
