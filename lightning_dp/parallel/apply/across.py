"""Across: the replicas of a process have met, and now the processes do.

Acts that want what all replicas of all processes brought get it here, as if these were replicas of
one process. Those of an idle process bring nothing, and get what the others get.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from lightning_dp.parallel.apply.rendezvous import Calls, Task, refuse_backward
from lightning_dp.parallel.devices import replica_names
from lightning_dp.parallel.errors import add_note
from lightning_dp.parallel.scatter import tree
from lightning_dp.parallel.split import Order
from lightning_dp.parallel.torch_private import is_in_backward

if TYPE_CHECKING:
    from lightning_dp.parallel.processes import World

T = TypeVar("T")


@dataclass(frozen=True)
class Everybody:
    """What all replicas brought to a collective, those of the first process first.

    Attributes:
        values: one for each replica.
        sizes: their samples; None if they are not known.
        order: the positions of these in the batch; None for the batch's own order.
        names: the replicas', for people.
    """

    values: list[Any]
    sizes: list[int] | None
    order: Order | None
    names: list[str]

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Says of an error about their values whose are which."""
        try:
            yield
        except ValueError as error:
            told = (f"{name}: {_kind(v)}" for name, v in zip(self.names, self.values, strict=True))
            add_note(error, f"[of {'; '.join(told)}]")
            raise


@dataclass(frozen=True)
class _About:
    """The replicas of a process."""

    sizes: list[int] | None
    order: Order | None
    names: list[str]


def everybody(calls: Calls, what: str, values: list[Any]) -> Everybody:
    """The values of all replicas of all processes, where those of this one are given."""
    names = [participant.name for participant in calls.participants]
    if calls.world is None:
        return Everybody(values, calls.sizes, calls.order, names)
    met = _met(calls, calls.world, what, _About(calls.sizes, calls.order, names), values)
    sizes = [about.sizes for _, about, _ in met]
    return Everybody(
        [value for _, _, own in met for value in own],
        None if None in sizes else list(chain.from_iterable(own or () for own in sizes)),
        _order([about for _, about, _ in met]),
        [name for _, about, _ in met for name in about.names],
    )


def of_processes(calls: Calls, what: str, value: T) -> list[T]:
    """What each process brings, but for idle ones; the value alone if there is one process."""
    if calls.world is None:
        return [value]
    return [brought for _, _, brought in _met(calls, calls.world, what, None, value)]


def _met(calls: Calls, world: World, what: str, about: Any, value: Any) -> list[Any]:
    """Ranks, what they are about, and what they bring, but for idle processes."""
    from lightning_dp.parallel.processes import RankGraph

    if is_in_backward():
        raise in_backward(what)
    if calls.rank_graph is None:
        calls.rank_graph = world.graph or RankGraph(world)
    through = f"a collective ({what})"
    check, is_idle = partial(refuse_backward, weakref.ref(calls), through), calls.is_idle
    ranks = calls.rank_graph.gather(what, about, value, is_idle=is_idle, check=check)
    calls.crossed |= calls.rank_graph.is_used
    return [(rank, *brought) for rank, brought in enumerate(ranks) if brought is not None]


def _order(abouts: Sequence[_About]) -> Order | None:
    """Of the samples of all processes, which follow each other in the batch."""
    if all(about.order is None for about in abouts):
        return None
    positions: list[Sequence[int]] = []
    for about in abouts:
        start = sum(map(len, positions))
        ends = [0, *accumulate(about.sizes or ())]
        own = about.order or [range(a, b) for a, b in pairwise(ends)]
        positions += [[start + i for i in of_replica] for of_replica in own]
    return positions


def in_backward(what: str) -> RuntimeError:
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


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if tree.children(value) is None:
        return type(value).__qualname__
    pairs = tree.children(value) or ()
    return f"{tree.kind_name(value)}({', '.join(f'{key}: {_kind(child)}' for key, child in pairs)})"
