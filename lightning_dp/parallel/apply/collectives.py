"""Collectives that a step may call: what one device would have with the whole batch.

In a replica each waits for all replicas that have samples, in all processes; a RendezvousError
names those that have ended their calls or are at another collective. Outside of replicas they
return their argument, as on one device; with several processes `process_calls` stand for this one.
Gradients flow through: the graph of one replica continues in the others, and the step's backward
runs through all of them at once.

Of several processes the replicas of each meet first, then the processes do. An idle process brings
nothing, and gets what the others get.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, chain, pairwise
from numbers import Number
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor

from lightning_dp.parallel.apply.rendezvous import Act, Calls, Task, current_participant
from lightning_dp.parallel.devices import replica_names
from lightning_dp.parallel.gather import gather
from lightning_dp.parallel.scatter import to_device, tree, weighted_mean
from lightning_dp.parallel.split import Order
from lightning_dp.parallel.torch_private import is_in_backward

if TYPE_CHECKING:
    from lightning_dp.parallel.processes import World

T = TypeVar("T")

_OPS = {name: name for name in ("mean", "sum", "min", "max", "product")}
_OPS |= {"avg": "mean", "prod": "product"}


def all_gather(x: T, process_calls: Calls | None = None) -> T:
    """The batch's `x`, in every replica: joined as a step's outputs are, see `gather`.

    Tensors with a row for each sample are concatenated in the order of the batch, 0-dim floating
    tensors become their mean weighted by shard size. Each replica gets tensors of its own.

    Args:
        x: a tensor, or containers of tensors, of the same structure on every replica.
        process_calls: of `as_one_replica`, where the user's code calls this outside of replicas.

    Raises:
        GatherError: the structures differ.
    """

    def act(calls: Calls, values: list[Any]) -> list[Any]:
        every, sizes, order = _of_all(calls, "all_gather", values)
        joined = partial(gather, every, dim=calls.dim, sizes=sizes, order=order)
        return [_clone_shared(joined(p.device), every) for p in calls.participants]

    return meet("all_gather", x, act, process_calls)


def reduce(x: T, op: Any = "mean", process_calls: Calls | None = None) -> T:
    """The replicas' tensors of one shape, or numbers, in one, in every replica.

    Args:
        x: what this replica brings; what is neither a tensor nor a number stays as it is.
        op: `"mean"` (or `"avg"`), weighted by shard size: of the shards' means it makes that of
            the batch; `"sum"`, `"min"`, `"max"`, `"product"`; or a `torch.distributed.ReduceOp`.
        process_calls: as in `all_gather`.

    Raises:
        ValueError: an unknown `op`, or the shapes differ.
    """
    if current_participant() is None and process_calls is None:
        return x
    name = _OPS.get((op if isinstance(op, str) else str(op).rsplit(".", 1)[-1]).lower())
    if name is None:
        raise ValueError(
            f"reduce: expected op 'mean', 'sum', 'min', 'max' or 'product', got {op!r}."
        )
    what = f"reduce with op={name!r}"

    def act(calls: Calls, values: list[Any]) -> list[Any]:
        every, sizes, _ = _of_all(calls, what, values)
        if not all(isinstance(value, Tensor | Number) for value in every):
            return values
        tensors = [torch.as_tensor(to_device(v, calls.participants[0].device)) for v in every]
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if len(set(shapes)) > 1:
            raise ValueError(
                f"Expected tensors of one shape to reduce, got {shapes}. Use all_gather for those "
                "that have a row for each sample."
            )
        total = _reduced(name, tensors, sizes or [1] * len(tensors)).to(tensors[0].dtype)
        if not isinstance(every[0], Tensor):
            return [total.item()] * len(values)
        return [total.to(p.device, copy=True) for p in calls.participants]

    return meet(what, x, act, process_calls)


def _reduced(op: str, tensors: list[Tensor], sizes: list[int]) -> Tensor:
    if op == "mean":
        exact = [t if t.is_floating_point() or t.is_complex() else t.double() for t in tensors]
        return weighted_mean(exact, list(map(float, sizes)))
    torchs: Any = {"sum": torch.sum, "product": torch.prod, "min": torch.amin, "max": torch.amax}
    return cast(Tensor, torchs[op](torch.stack(tensors), 0))


def broadcast(x: T, src: int = 0) -> T:
    """The `x` of one replica in all of them, its tensors on each one's device.

    Args:
        x: anything; objects that are neither tensors nor containers of tensors are shared.
        src: the replica, counted among those that have samples, in all processes.

    Raises:
        ValueError: there is no such replica.
    """
    what = f"broadcast from {src}"

    def act(calls: Calls, values: list[Any]) -> list[Any]:
        every, _, _ = _of_all(calls, what, values)
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

    def act(calls: Calls, values: list[None]) -> list[None]:
        of_processes(calls, what, None)
        return values

    meet(what, None, act)


def decide(decision: bool, *, everybody: bool = True) -> bool:
    """Whether all replicas, or with `everybody=False` any of them, decide so."""
    rule, what = all if everybody else any, "reduce_boolean_decision"

    def act(calls: Calls, values: list[bool]) -> list[bool]:
        return [rule(of_processes(calls, what, rule(values)))] * len(values)

    return meet(what, bool(decision), act)


# What they share


def meet(what: str, x: T, act: Act, process_calls: Calls | None = None) -> T:
    """What `act` makes of the replicas' `x`, see `Task.meet`; `x` if there are no others."""
    participant = current_participant()
    if must_meet(what):
        return cast(T, cast(Task, participant).meet(what, x, act))
    return x if participant or process_calls is None else cast(T, act(process_calls, [x])[0])


def must_meet(what: str) -> bool:
    """Whether the collective `what`, called here, has other replicas to wait for."""
    participant = current_participant()
    if participant is None:
        if is_in_backward():
            raise _in_backward(what)
        return False
    participant.calls.check()
    return len(participant.calls.participants) > 1 or participant.calls.world is not None


def _of_all(
    calls: Calls, what: str, values: list[Any]
) -> tuple[list[Any], list[int] | None, Order | None]:
    """The values of all processes' replicas, given those of this process; the first process first.

    Returns them prepared for the graphs of other replicas; the replicas' sample counts, if known;
    and the positions of these samples in the batch, None for the order of the batch.
    """
    values = [link(calls, value) for value in values]
    if calls.world is None:
        return values, calls.sizes, calls.order
    received = exchange_with_processes(calls, what, (calls.sizes, calls.order), values)
    rank_sizes = [sizes for (sizes, _), _ in received]
    sizes = None if None in rank_sizes else list(chain.from_iterable(rank_sizes))
    order: list[Sequence[int]] | None = None
    if any(rank_order is not None for (_, rank_order), _ in received):
        order = []  # the samples of the processes follow each other in the batch
        for (of_rank, rank_order), _ in received:
            start, ends = sum(map(len, order)), [0, *accumulate(of_rank)]
            rank_order = rank_order or [range(a, b) for a, b in pairwise(ends)]
            order += [[start + i for i in of_replica] for of_replica in rank_order]
    return [value for _, rank_values in received for value in rank_values], sizes, order


def of_processes(calls: Calls, what: str, value: T) -> list[T]:
    """The value of each process that is not idle; this value alone if there is one process."""
    return [received for _, received in exchange_with_processes(calls, what, None, value)]


def exchange_with_processes(calls: Calls, what: str, sizes_and_order: Any, value: Any) -> list[Any]:
    """Sends (sizes_and_order, value) to all processes; returns the pairs of those not idle."""
    if (world := calls.world) is None:
        return [(sizes_and_order, value)]
    from lightning_dp.parallel.processes import RankGraph

    if is_in_backward():
        raise _in_backward(what)
    calls.rank_graph = graph = calls.rank_graph or RankGraph(world)
    check = partial(_refuse_backward, weakref.ref(calls), f"a collective ({what})")
    pairs = graph.all_gather(what, sizes_and_order, value, is_idle=calls.is_idle, check=check)
    calls.crossed |= graph.is_used
    return [pair for pair in pairs if pair is not None]


def as_one_replica(world: World, device: torch.device, *, is_idle: bool) -> Calls:
    """Calls for collectives in a process's code outside of replicas: as if it were one replica.

    Args:
        world: the processes.
        device: where its values are.
        is_idle: whether the others get nothing from here.
    """
    calls = Calls(None, world=world)
    calls.is_open, calls.is_idle, calls.names = False, is_idle, replica_names([device], world.rank)
    calls.participants = [Task(0, device, lambda: None)]
    calls.participants[0].calls = calls
    return calls


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
