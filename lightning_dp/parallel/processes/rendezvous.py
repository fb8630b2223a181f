"""The rendezvous of processes: each brings a value to a collective, and gets those of all.

A process's replicas have met before, and the host speaks for them all. What is brought says which
collective it is for: a process that is somewhere else is named.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_dp.parallel.batch import to_device, tree
from lightning_dp.parallel.processes.crossings import Crossings
from lightning_dp.parallel.processes.together import check_together

_HOST = torch.device("cpu")


@dataclass(frozen=True)
class Brought:
    """What one process brings to a collective.

    Attributes:
        what: the collective, as people know it.
        about: of its replicas.
        value: with tensors on the host, without graphs; None from an idle process.
        graphs: which leaves have a graph that goes on in the other processes.
    """

    what: str
    about: Any
    value: Any
    graphs: tuple[int, ...]
    is_idle: bool


def meet_processes(
    crossings: Crossings,
    what: str,
    about: Any,
    value: Any,
    *,
    is_idle: bool = False,
    check: Callable[[], None] = lambda: None,
) -> list[tuple[Any, Any] | None]:
    """What every process is about and brings, in the order of the ranks; None for an idle one.

    This process's own value is as it was given. The tensors of others are on the host; where they
    have graphs, gradients go back to where they came from.

    Args:
        crossings: where the graph of this step goes on in other processes.
        what: the collective.
        about: of this process's replicas; anything.
        value: a tree of tensors and others.
        is_idle: whether the others get nothing from this process.
        check: called before gradients go to other processes; raises an error where they must not.
    """
    sent = to_device(value, _HOST)
    leaves = tree.leaves(sent)
    graphs = tuple(i for i, leaf in enumerate(leaves) if _has_graph(leaf))
    plain = None if is_idle else tree.map_leaves(_plain, sent)
    own = Brought(what, about, plain, () if is_idle else graphs, is_idle)
    told = crossings.world.gather(own)
    check_together(told)
    values = [brought.value for brought in told]
    if any(brought.graphs for brought in told):
        own_tensors = [leaves[i] for i in graphs]
        values = _crossed(crossings, what, told, own_tensors, check)
    values[crossings.world.rank] = value
    pairs = zip(told, values, strict=True)
    return [None if brought.is_idle else (brought.about, value) for brought, value in pairs]


def _has_graph(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad and torch.is_grad_enabled()


def _plain(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _crossed(
    crossings: Crossings,
    what: str,
    told: Sequence[Brought],
    own: Sequence[Tensor],
    check: Callable[[], None],
) -> list[Any]:
    """The values, in which tensors have the graphs that they have in their processes."""
    leaves = [tree.leaves(brought.value) for brought in told]
    tensors = [[own[i] for i in b.graphs] for b, own in zip(told, leaves, strict=True)]
    linked = crossings.cross(what, own, tensors, check)
    values = []
    for brought, old, new in zip(told, leaves, linked, strict=True):
        for i, tensor in zip(brought.graphs, new, strict=True):
            old[i] = tensor
        values.append(_refilled(brought.value, old))
    return values


def _refilled(node: Any, leaves: Sequence[Any]) -> Any:
    arrived = iter(leaves)
    return tree.map_leaves(lambda _: next(arrived), node)
