"""Collectives that a step may call: what one device would have with the whole batch.

In a replica each waits for all replicas that have samples; a RendezvousError names those that have
ended their calls or are at another collective. Outside of replicas they return their argument, as
on one device. Gradients flow through: the graph of one replica continues in the others, and the
step's backward runs through all of them at once. Steps of several processes refuse them by name.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from numbers import Number
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from lightning_dp.parallel.apply.rendezvous import Act, Calls, Task, current_participant
from lightning_dp.parallel.gather import gather
from lightning_dp.parallel.scatter import to_device, tree, weighted_mean
from lightning_dp.parallel.torch_private import is_in_backward

T = TypeVar("T")

_OPS = {name: name for name in ("mean", "sum", "min", "max", "product")}
_OPS |= {"avg": "mean", "prod": "product"}


def all_gather(x: T) -> T:
    """The batch's `x`, in every replica: joined as a step's outputs are, see `gather`.

    Tensors with a row for each sample are concatenated in the order of the batch, 0-dim floating
    tensors become their mean weighted by shard size. Each replica gets tensors of its own.

    Args:
        x: a tensor, or containers of tensors, of the same structure on every replica.

    Raises:
        GatherError: the structures differ.
    """

    def act(calls: Calls, values: list[Any]) -> list[Any]:
        every = [link(calls, value) for value in values]
        joined = partial(gather, every, dim=calls.dim, sizes=calls.sizes, order=calls.order)
        return [_clone_shared(joined(p.device), every) for p in calls.participants]

    return meet("all_gather", x, act)


def reduce(x: T, op: Any = "mean") -> T:
    """The replicas' tensors of one shape, or numbers, in one, in every replica.

    Args:
        x: what this replica brings; what is neither a tensor nor a number stays as it is.
        op: `"mean"` (or `"avg"`), weighted by shard size: of the shards' means it makes that of
            the batch; `"sum"`, `"min"`, `"max"`, `"product"`; or a `torch.distributed.ReduceOp`.

    Raises:
        ValueError: an unknown `op`, or the shapes differ.
    """
    if current_participant() is None:
        return x
    name = op_name(op)
    what = f"reduce with op={name!r}"

    def act(calls: Calls, values: list[Any]) -> list[Any]:
        every = [link(calls, value) for value in values]
        if not all(isinstance(value, Tensor | Number) for value in every):
            return values
        device = calls.participants[0].device
        tensors = [torch.as_tensor(to_device(value, device)) for value in every]
        total = reduced(name, tensors, calls.sizes or [1] * len(tensors))
        if not isinstance(every[0], Tensor):
            return [total.item()] * len(values)
        return [total.to(p.device, copy=True) for p in calls.participants]

    return meet(what, x, act)


def op_name(op: Any) -> str:
    """What a reduction is called here; raises a ValueError for one that there is not."""
    name = _OPS.get((op if isinstance(op, str) else str(op).rsplit(".", 1)[-1]).lower())
    if name is None:
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
    torchs: Any = {"sum": torch.sum, "product": torch.prod, "min": torch.amin, "max": torch.amax}
    return cast(Tensor, torchs[name](torch.stack([*tensors]), 0).to(tensors[0].dtype))


def broadcast(x: T, src: int = 0) -> T:
    """The `x` of one replica in all of them, its tensors on each one's device.

    Args:
        x: anything; objects that are neither tensors nor containers of tensors are shared.
        src: the replica, counted among those that have samples.

    Raises:
        ValueError: there is no such replica.
    """
    what = f"broadcast from {src}"

    def act(calls: Calls, values: list[Any]) -> list[Any]:
        every = [link(calls, value) for value in values]
        if not 0 <= src < len(every):
            raise ValueError(
                f"broadcast: expected src from 0 to {len(every) - 1}, one of the {len(every)} "
                f"replicas that have samples, got {src}."
            )
        return [_clone_shared(to_device(every[src], p.device), every) for p in calls.participants]

    return meet(what, x, act)


def barrier(name: str | None = None) -> None:
    """Waits for all replicas; `name` is for the error if one does not come."""
    what = "barrier" if name is None else f"barrier {name!r}"
    meet(what, None, lambda calls, values: values)


def decide(decision: bool, *, everybody: bool = True) -> bool:
    """Whether all replicas, or with `everybody=False` any of them, decide so."""
    rule, what = all if everybody else any, "reduce_boolean_decision"

    def act(calls: Calls, values: list[bool]) -> list[bool]:
        return [rule(values)] * len(values)

    return meet(what, bool(decision), act)


# What they share


def meet(what: str, x: T, act: Act) -> T:
    """What `act` makes of the replicas' `x`, see `Task.meet`; `x` if there are no others."""
    return cast(T, cast(Task, current_participant()).meet(what, x, act)) if must_meet(what) else x


def must_meet(what: str) -> bool:
    """Whether the collective `what`, called here, has other replicas to wait for."""
    participant = current_participant()
    if participant is None:
        if is_in_backward():
            raise _in_backward(what)
        return False
    participant.calls.check()
    if participant.calls.world is not None:
        raise RuntimeError(
            f"Expected no {what} in a step of several processes, got one: a step may look at the "
            "samples of its own process alone. Use one process, which can have all devices of the "
            "machine, or Lightning's strategy='ddp'."
        )
    return len(participant.calls.participants) > 1


def _in_backward(what: str) -> RuntimeError:
    """The error for a collective that an activation checkpoint comes to again."""
    return RuntimeError(
        f"Expected {what} outside of a backward, got it inside: an activation checkpoint "
        "recomputes the part of the step that calls it, where the replicas do not meet. Leave "
        "this part out of the checkpoint."
    )


def _refuse_backward(running: Callable[[], Calls | None], through: str) -> None:
    """Refuses a replica's own backward through a graph that it shares with other replicas."""
    calls = running()
    if calls is not None and calls.is_open:
        raise RuntimeError(
            f"Expected no backward and no torch.autograd.grad through {through} inside of "
            "training_step: other replicas are part of this graph, and their losses are not there "
            'yet. Return the loss, or use DataParallelStrategy(mode="forward").'
        )


# Graphs that continue in other replicas


def link(calls: Calls, node: Any) -> Any:
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
        _refuse_backward(ctx.calls, "a collective, or batch norm with sync_batchnorm=True")
        return gradient, None


_linked: Callable[[Tensor, Calls], Tensor] = _Link.apply


def _clone_shared(node: Any, others: Any) -> Any:
    """Copies the tensors that other replicas have too."""
    shared = {id(leaf) for leaf in tree.leaves(others)}

    def clone(leaf: Any) -> Any:
        return leaf.clone() if isinstance(leaf, Tensor) and id(leaf) in shared else leaf

    return tree.map_leaves(clone, node)
