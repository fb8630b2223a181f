"""Collectives that a step may call: what one device would have with the whole batch.

In a replica each waits for all replicas that have samples, in all processes. Outside of replicas
they return their argument, as on one device; with several processes `host` stands for this one.
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
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from lightning_dp.parallel.apply.rendezvous import (
    Act,
    Calls,
    Task,
    current_participant,
    refuse_backward,
)
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


def all_gather(x: T, host: Calls | None = None) -> T:
    """The batch's `x`, in every replica: joined as a step's outputs are, see `gather`.

    Tensors with a row for each sample are concatenated in the order of the batch, 0-dim floating
    tensors become their mean weighted by shard size. Each replica gets tensors of its own.

    Args:
        x: a tensor, or containers of tensors, of the same structure on every replica.
        host: stands for a process outside of its replicas; see `as_one_replica`.

    Raises:
        RendezvousError: a replica ended its call, or is at another collective.
        GatherError: the structures differ.
    """
    return meet("all_gather", x, _all_gather, host)


def reduce(x: T, op: Any = "mean", host: Calls | None = None) -> T:
    """The replicas' tensors of one shape, or numbers, in one, in every replica.

    Args:
        x: what this replica brings.
        op: `"mean"` (or `"avg"`), weighted by shard size: of the shards' means it makes that of
            the batch; `"sum"`, `"min"`, `"max"`, `"product"`; or a `torch.distributed.ReduceOp`.
        host: as in `all_gather`.

    Raises:
        RendezvousError: a replica ended its call, or is at another collective.
        ValueError: an unknown `op`, or the shapes differ.
    """
    if current_participant() is None and host is None:
        return x
    name = _OPS.get((op if isinstance(op, str) else str(op).rsplit(".", 1)[-1]).lower())
    if name is None:
        raise ValueError(
            f"reduce: expected op 'mean', 'sum', 'min', 'max' or 'product', got {op!r}."
        )
    what = f"reduce with op={name!r}"
    return meet(what, x, partial(_reduce, name, what), host)


def broadcast(x: T, src: int = 0) -> T:
    """The `x` of one replica in all of them, its tensors on each one's device.

    Args:
        x: anything; objects that are neither tensors nor containers of tensors are shared.
        src: the replica, counted among those that have samples, in all processes.

    Raises:
        RendezvousError: a replica ended its call, or is at another collective.
        ValueError: there is no such replica.
    """
    return meet(f"broadcast from {src}", x, partial(_broadcast, src))


def barrier(name: str | None = None) -> None:
    """Waits for all replicas; `name` is for the error if one does not come.

    Raises:
        RendezvousError: a replica ended its call, or is at another collective.
    """
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


def must_meet(what: str) -> bool:
    """Whether the collective `what`, called here, has other replicas to wait for."""
    participant = current_participant()
    if participant is None:
        if is_in_backward():
            raise _in_backward(what)
        return False
    participant.calls.check()
    return len(participant.calls.participants) > 1 or participant.calls.world is not None


def meet(what: str, x: T, act: Act, host: Calls | None = None) -> T:
    """What `act` makes of the replicas' `x`, see `Task.meet`; `x` if there are no others."""
    participant = current_participant()
    if participant is None or not must_meet(what):
        is_host = participant is None and not must_meet(what) and host is not None
        return cast(T, act(cast(Calls, host), [x])[0]) if is_host else x
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return cast(T, participant.meet(what, (x, modes), partial(_in_modes_of_replica, act)))


def _in_modes_of_replica(act: Act, calls: Calls, brought: list[Any]) -> Sequence[Any]:
    """Acts in the grad and inference mode of the code that calls the collective."""
    grad, inference = brought[0][1]
    with torch.inference_mode(inference), torch.set_grad_enabled(grad):
        return act(calls, [value for value, _ in brought])


# What replicas and processes bring


class Brought(NamedTuple):
    """What all replicas brought to a collective, those of the first process first."""

    values: list[Any]
    sizes: list[int] | None  # their samples; None if they are not known
    order: Order | None  # the positions of these in the batch; None for the batch's own order


def of_processes(calls: Calls, what: str, value: T) -> list[T]:
    """What each process brings, but for idle ones; the value alone if there is one process."""
    return [value] if calls.world is None else [own for _, own in _met(calls, what, None, value)]


def _of_replicas(calls: Calls, what: str, values: list[Any]) -> Brought:
    """The values of all replicas of all processes, linked; those of this one are given."""
    values = [link(calls, value) for value in values]
    if calls.world is None:
        return Brought(values, calls.sizes, calls.order)
    met = _met(calls, what, (calls.sizes, calls.order), values)
    sizes = [own for (own, _), _ in met]
    whole = None if None in sizes else list(chain.from_iterable(sizes))
    order: list[Sequence[int]] | None = None
    if any(own is not None for (_, own), _ in met):
        order = []  # the samples of the processes follow each other in the batch
        for (of_rank, own), _ in met:
            start, ends = sum(map(len, order)), [0, *accumulate(of_rank)]
            own = own or [range(a, b) for a, b in pairwise(ends)]
            order += [[start + i for i in of_replica] for of_replica in own]
    return Brought([value for _, own in met for value in own], whole, order)


def _met(calls: Calls, what: str, about: Any, value: Any) -> list[Any]:
    """What processes are about and what they bring, but for idle ones."""
    from lightning_dp.parallel.processes import RankGraph

    if is_in_backward():
        raise _in_backward(what)
    world = cast("World", calls.world)
    if calls.rank_graph is None:
        calls.rank_graph = world.graph or RankGraph(world)
    check = partial(refuse_backward, weakref.ref(calls), f"a collective ({what})")
    ranks = calls.rank_graph.gather(what, about, value, is_idle=calls.is_idle, check=check)
    calls.crossed |= calls.rank_graph.is_used
    return [brought for brought in ranks if brought is not None]


def _in_backward(what: str) -> RuntimeError:
    """The error for a collective that an activation checkpoint comes to again."""
    return RuntimeError(
        f"Expected {what} outside of a backward, got it inside: an activation checkpoint "
        "recomputes the part of the step that calls it, where the replicas do not meet. Leave "
        "this part out of the checkpoint."
    )


def as_one_replica(world: World, device: torch.device, *, is_idle: bool) -> Calls:
    """Calls for acts of a process's own code, outside of replicas: as if it were one replica.

    In a step its shard is the process's part of the batch. Elsewhere sizes are not known.

    Args:
        world: the processes.
        device: where its values are.
        is_idle: whether the others get nothing from here.
    """
    samples = None if world.graph is None else world.graph.samples
    calls = Calls(None if samples is None else [samples], world=world)
    calls.is_open, calls.is_idle, calls.names = False, is_idle, replica_names([device], world.rank)
    calls.participants = [Task(0, device, lambda: None)]
    calls.participants[0].calls = calls
    return calls


# What the host does


def _all_gather(calls: Calls, values: list[Any]) -> list[Any]:
    brought = _of_replicas(calls, "all_gather", values)
    options: dict[str, Any] = {"dim": calls.dim, "sizes": brought.sizes, "order": brought.order}
    joined = [gather(brought.values, p.device, **options) for p in calls.participants]
    return [_own(node, brought.values) for node in joined]


def _reduce(op: str, what: str, calls: Calls, values: list[Any]) -> list[Any]:
    brought = _of_replicas(calls, what, values)
    if not all(isinstance(value, Tensor | Number) for value in brought.values):
        return values
    device = calls.participants[0].device
    tensors = [torch.as_tensor(to_device(value, device)) for value in brought.values]
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if len(set(shapes)) > 1:
        raise ValueError(
            f"Expected tensors of one shape to reduce, got {shapes}. Use all_gather for those "
            "that have a row for each sample."
        )
    total = _reduced(op, tensors, brought.sizes or [1] * len(tensors)).to(tensors[0].dtype)
    if not isinstance(brought.values[0], Tensor):
        return [total.item()] * len(values)
    return [total.to(p.device, copy=True) for p in calls.participants]


def _reduced(op: str, tensors: list[Tensor], sizes: list[int]) -> Tensor:
    if op == "mean":
        exact = [t if t.is_floating_point() or t.is_complex() else t.double() for t in tensors]
        return weighted_mean(exact, list(map(float, sizes)))
    torchs: Any = {"sum": torch.sum, "product": torch.prod, "min": torch.amin, "max": torch.amax}
    return cast(Tensor, torchs[op](torch.stack(tensors), 0))


def _broadcast(src: int, calls: Calls, values: list[Any]) -> list[Any]:
    what = f"broadcast from {src}"
    rank = 0 if calls.world is None else calls.world.rank
    counts = dict(of_processes(calls, what, (rank, len(values))))  # without idle ranks
    total = sum(counts.values())
    if not 0 <= src < total:
        raise ValueError(
            f"broadcast: expected src from 0 to {total - 1}, one of the {total} replicas that "
            f"have samples, got {src}."
        )
    k = src - sum(count for r, count in counts.items() if r < rank)
    is_here = 0 <= k < counts.get(rank, 0)
    sent = of_processes(calls, what, [link(calls, values[k])] if is_here else None)
    [source] = next(one for one in sent if one is not None)
    copies = [_own(to_device(source, p.device), [source]) for p in calls.participants]
    if is_here:
        copies[k] = values[k]
    return copies


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
        refuse_backward(ctx.calls, "a collective, or batch norm with sync_batchnorm=True")
        return gradient, None


_linked: Callable[[Tensor, Calls], Tensor] = _Link.apply


def _own(node: Any, others: Any) -> Any:
    """Copies the tensors that other replicas have too."""
    shared = {id(leaf) for leaf in tree.leaves(others)}

    def own(leaf: Any) -> Any:
        return leaf.clone() if isinstance(leaf, Tensor) and id(leaf) in shared else leaf

    return tree.map_leaves(own, node)
