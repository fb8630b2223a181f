"""Crossings: where the graph of a step goes on in other processes.

Each is a node of autograd. In the forward it has the tensors of the other processes; in the
backward it sends them the gradients that these tensors have got here, and this process's own get
the sum of what the others have sent. So all processes have to run through all crossings, and in the
same order: each depends on the one before, and so the backward comes to the latest one first. And
the backward begins at the end of them all, beside the losses: it gets there in a process, too,
whose loss uses nothing of the others, or weighs nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_dp.parallel.generated import context
from lightning_dp.parallel.processes.together import check_together
from lightning_dp.parallel.processes.world import World

_SMALL = 2**15
"""Gradients of so many elements at most go straight to everybody, in one round trip."""


class Crossings:
    """The crossings of a step so far, in the order in which all processes came to them.

    Args:
        world: the processes.
        samples: of the step, in this process; None if they are not known.
    """

    def __init__(self, world: World, samples: int | None = None) -> None:
        self.world, self.samples = world, samples
        self._nodes: list[Any] = []
        self._end: Tensor | None = None

    @property
    def are_there(self) -> bool:
        """Whether there are any."""
        return bool(self._nodes)

    def cross(
        self,
        what: str,
        own: Sequence[Tensor],
        tensors: Sequence[Sequence[Tensor]],
        check: Callable[[], None],
    ) -> list[list[Tensor]]:
        """Joins the graphs of all processes in one more crossing.

        Args:
            what: people know it as.
            own: this process's tensors; those that it brings, or those of an idle one.
            tensors: those that each process brings, on the host, without graphs.
            check: called before a gradient goes to others; raises an error where it must not.

        Returns:
            Those of all processes; of the others with graphs.
        """
        way = _Way(self.world, what, len(self._nodes), [list(own) for own in tensors], check)
        # All processes make this node, whatever the modes of the code that this one runs.
        with torch.inference_mode(False), torch.enable_grad():
            end = torch.zeros((), requires_grad=True) if self._end is None else self._end
            self._end, *others = _crossing(end, way, *own)
        self._nodes.append(self._end.grad_fn)
        arrived = iter(others)
        return [
            list(own) if rank == self.world.rank else [next(arrived) for _ in own]
            for rank, own in enumerate(tensors)
        ]

    def end_for(
        self, losses: Sequence[Tensor], keep_graph: bool, *, is_last: bool
    ) -> tuple[Tensor | None, bool]:
        """What a backward of these losses begins at as well; and whether it keeps the graph.

        Where other backwards of the step may come, it is asked whether any process's losses have to
        do with others at all. If they have, it goes through all crossings: what a later one needs
        of the graph has to be kept.

        Args:
            losses: this process's.
            keep_graph: whether the backward was to keep the graph anyway.
            is_last: whether it is the step's only one, or the last.
        """
        if self._end is None:
            return None, keep_graph
        if not is_last:
            reached = set().union(*self.world.gather(self._reached(losses)))
            if not reached:
                return None, keep_graph
            keep_graph = keep_graph or len(reached) < len(self._nodes)
        end = self._end
        if not keep_graph:
            self.clear()
        return end, keep_graph

    def clear(self) -> None:
        """Lets go of the graph."""
        self._nodes, self._end = [], None

    def _reached(self, losses: Sequence[Tensor]) -> list[int]:
        """Which crossings losses depend on, not counting that each comes after another."""
        waiting, seen = [loss.grad_fn for loss in losses], set()
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            edges = node.next_functions[1:] if node in self._nodes else node.next_functions
            waiting.extend(before for before, _ in edges)
        return [i for i, node in enumerate(self._nodes) if node in seen]


_OF_STEPS: MutableMapping[World, Crossings] = weakref.WeakKeyDictionary()


@context
def one_graph(world: World, samples: int | None = None) -> Iterator[Crossings]:
    """While it lasts, what processes tell each other belongs to the graph of one step.

    For a step that a process runs itself. Replicas that run one have the graph of their calls.
    """
    before = _OF_STEPS.get(world)
    _OF_STEPS[world] = crossings = Crossings(world, samples)
    try:
        yield crossings
    finally:
        if before is None:
            del _OF_STEPS[world]
        else:
            _OF_STEPS[world] = before


def open_graph(world: World) -> Crossings | None:
    """That of the step which this process runs itself; None if it runs none."""
    return _OF_STEPS.get(world)


@dataclass(frozen=True)
class _Way:
    """The way through one crossing.

    Attributes:
        tensors: those that each process brings.
    """

    world: World
    what: str
    number: int
    tensors: list[list[Tensor]]
    check: Callable[[], None]


@dataclass(frozen=True)
class _Sent:
    """What a process sends back.

    Attributes:
        what: says where it is.
        gradients: of the tensors of all processes, None for its own and those that have got none.
            Where they are large, whether there is one.
    """

    what: str
    gradients: list[Tensor | bool | None]


class _Crossing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, end: Tensor, way: _Way, *own: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.way, ctx.own = way, len(own)
        others = [t for r, own in enumerate(way.tensors) if r != way.world.rank for t in own]
        shapes = [[torch.empty_like(t, device="meta") for t in own] for own in way.tensors]
        ctx.way = _Way(way.world, way.what, way.number, shapes, way.check)
        return (end.clone(), *others)

    @staticmethod
    def backward(ctx: Any, _: Tensor | None, *gradients: Tensor | None) -> tuple[Any, ...]:
        way: _Way = ctx.way
        way.check()
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"Expected no create_graph=True in a backward through {way.what} over several "
                "processes: gradients that come from other processes have no graph. Take second "
                "derivatives of what the step computes from its own samples."
            )
        sums = _sent_back(way, gradients)
        # An idle process has brought nothing.
        return (None, None, *(sums or [None] * ctx.own))


_crossing: Callable[..., list[Tensor]] = _Crossing.apply


def _sent_back(way: _Way, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Sends all gradients to where their tensors came from; the sums of this process's own."""
    rank, arrived = way.world.rank, iter(gradients)
    sent: list[Tensor | None] = []
    for r, tensors in enumerate(way.tensors):
        sent += [None if r == rank else _dense(next(arrived)) for _ in tensors]
    start = sum(len(tensors) for tensors in way.tensors[:rank])
    own = slice(start, start + len(way.tensors[rank]))
    sums = _added_up if sum(t.numel() for t in _flat(way.tensors)) <= _SMALL else _reduced
    return sums(way, sent)[own]


def _added_up(way: _Way, sent: list[Tensor | None]) -> list[Tensor | None]:
    columns = zip(*_told(way, list(sent)), strict=True)
    terms = [[term for term in column if term is not None] for column in columns]
    return [sum(own[1:], own[0]) if own else None for own in terms]


def _reduced(way: _Way, sent: list[Tensor | None]) -> list[Tensor | None]:
    told = _told(way, [gradient is not None for gradient in sent])
    present = [any(column) for column in zip(*told, strict=True)]
    like = _flat(way.tensors)
    sums: list[Tensor | None] = [None] * len(sent)
    for dtype in dict.fromkeys(tensor.dtype for tensor in like):
        those = [i for i, t in enumerate(like) if t.dtype == dtype and present[i]]
        if not those:
            continue
        parts = [sent[i] for i in those]
        zeros = [torch.zeros(like[i].numel(), dtype=dtype) for i in those]
        flat = [z if g is None else g.reshape(-1) for g, z in zip(parts, zeros, strict=True)]
        total = torch.cat(flat)
        way.world.sum_(total)
        for i, part in zip(those, total.split([like[i].numel() for i in those]), strict=True):
            sums[i] = part.view(like[i].shape)
    return sums


def _told(way: _Way, gradients: list[Any]) -> list[list[Any]]:
    where = f"the backward of {way.what} (number {way.number})"
    told = way.world.gather(_Sent(where, gradients))
    check_together(told)
    return [one.gradients for one in told]


def _dense(gradient: Tensor | None) -> Tensor | None:
    if gradient is None or gradient.layout is torch.strided:
        return gradient
    return gradient.to_dense()


def _flat(tensors: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [tensor for own in tensors for tensor in own]
