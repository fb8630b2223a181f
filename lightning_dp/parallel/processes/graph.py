"""The joint loss of all ranks, and the autograd graph of a step that continues in other ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_dp.parallel.processes.gradients import sum_over_ranks
from lightning_dp.parallel.processes.world import World, check_together
from lightning_dp.parallel.scatter import to_device, tree


class OwnLoss(NamedTuple):
    """What one rank sends of its loss.

    Attributes:
        value: the loss of its samples; None if no replica has one.
        samples: how many there are; 0 for an idle rank, whose loss weighs nothing.
        items: what the loss is a mean over, if not samples.
        has_graph: whether parameters get gradients from it.
        dtype: of the loss.
        writes: whether the step has written to buffers.
    """

    value: float | None
    samples: int
    items: float | None = None
    has_graph: bool = False
    dtype: torch.dtype | None = None
    writes: bool = False


@dataclass(frozen=True)
class JointLoss:
    """The loss of all ranks' samples.

    Attributes:
        value: the loss; None if no rank has one.
        share: the weight of this rank's loss.
        items: what it is a mean over, if not samples.
        has_graph: whether any rank's parameters get gradients from it.
        dtype: of the loss, the same in every rank.
        writes: whether any rank has written to buffers.
        samples: of each rank.
        first: the first rank with samples.
    """

    value: float | None
    share: float
    items: float | None
    has_graph: bool
    dtype: torch.dtype | None
    writes: bool
    samples: tuple[int, ...]
    first: int


class Losses:
    """One rank's loss of a step, and those of all ranks once they are exchanged.

    They are exchanged once, also if the step runs again after running out of memory. Whoever
    gathers something else at the end of the step may send them along, and set `of_all`.
    """

    def __init__(self, own: OwnLoss) -> None:
        self.own = own
        self.of_all: Sequence[OwnLoss] | None = None

    def join(self, world: World, *, is_sum: bool) -> JointLoss:
        """The loss of all ranks; with `is_sum` losses are sums over samples, not means."""
        if self.of_all is None:
            self.of_all = world.gather(self.own)
            check_together(self.of_all)
        losses, samples = self.of_all, tuple(loss.samples for loss in self.of_all)
        having = [loss for loss in losses if loss.value is not None and loss.samples]
        shares = _shares(losses, is_sum=is_sum)
        values = [s * (loss.value or 0.0) for s, loss in zip(shares, losses, strict=True) if s]
        is_over_items = bool(having) and having[0].items is not None
        return JointLoss(
            sum(values) if having else None,
            shares[world.rank],
            sum([loss.items or 0 for loss in having]) if is_over_items else None,
            any([loss.has_graph for loss in having]),
            having[0].dtype if having else None,
            any([loss.writes for loss in losses]),
            samples,
            next((rank for rank, n in enumerate(samples) if n), 0),
        )


def join_processes(own: OwnLoss, world: World, *, is_sum: bool) -> JointLoss:
    """The loss of all ranks, where this is one rank's."""
    return Losses(own).join(world, is_sum=is_sum)


def _shares(losses: Sequence[OwnLoss], *, is_sum: bool) -> list[float]:
    counts: list[float] = [0 if loss.value is None else loss.samples for loss in losses]
    if is_sum:
        return [1.0 if n else 0.0 for n in counts]
    items = [loss.items for loss, n in zip(losses, counts, strict=True) if n]
    if items.count(None) not in (0, len(items)):
        raise ValueError(
            f"Expected num_items from every process or from none, got {items}. Give it for every "
            "shard: the number of items that the loss is a mean over."
        )
    if any(items):
        counts = [(loss.items or 0) * bool(n) for loss, n in zip(losses, counts, strict=True)]
    total = sum(counts)
    return [n / total if total else 0.0 for n in counts]


# [Note: one autograd graph over several ranks]
# A differentiable all_gather is a node in every rank's graph. In the forward it returns the other
# ranks' tensors; in the backward all ranks add up the gradients of all tensors, and each takes the
# sums of its own. So every rank's backward must come to all nodes, in the same order. Therefore
# each node depends on the one before through a token, and the backward starts at the last token
# beside the loss: also in a rank whose loss uses nothing of the others, or weighs nothing.


@dataclass(frozen=True)
class _Brought:
    """What one rank brings to a collective; `what` is the collective's name.

    Attributes:
        about: its replicas.
        value: with tensors on the host, without graphs; None from an idle rank.
        graphs: which of its leaves have a graph.
    """

    what: str
    about: Any
    value: Any
    graphs: tuple[int, ...]
    is_idle: bool


class RankGraph:
    """The differentiable gathers of one step.

    Args:
        world: the processes.
        samples: of the step in this rank; None if not known.
    """

    def __init__(self, world: World, samples: int | None = None) -> None:
        self.world, self.samples = world, samples
        self._nodes: list[Any] = []
        self._token: Tensor | None = None

    @property
    def is_used(self) -> bool:
        """Whether the graph continues in other ranks."""
        return bool(self._nodes)

    def gather(
        self, what: str, about: Any, value: Any, *, is_idle: bool, check: Callable[[], None]
    ) -> list[tuple[Any, Any] | None]:
        """What every rank is about and brings, in the order of the ranks; None for an idle one.

        This rank's value stays as it is. Others' tensors are on the host; gradients flow back to
        the rank that they came from.

        Args:
            what: the collective's name.
            about: this rank's replicas.
            value: a tree of tensors and others.
            is_idle: whether the others get nothing from this rank.
            check: called in the backward; raises where gradients must not leave this rank.
        """
        sent = to_device(value, torch.device("cpu"))
        leaves = tree.leaves(sent)
        graphs = tuple(i for i, leaf in enumerate(leaves) if _has_graph(leaf))
        own = _Brought(what, about, None if is_idle else sent, () if is_idle else graphs, is_idle)
        ranks = self.world.gather(own)
        check_together(ranks)
        values = [brought.value for brought in ranks]
        if any(brought.graphs for brought in ranks):
            theirs = [tree.leaves(brought.value) for brought in ranks]
            tensors = [[t[i] for i in b.graphs] for b, t in zip(ranks, theirs, strict=True)]
            linked = self._link([leaves[i] for i in graphs], tensors, check)
            for rank, (brought, new) in enumerate(zip(ranks, linked, strict=True)):
                for i, tensor in zip(brought.graphs, new, strict=True):
                    theirs[rank][i] = tensor
                values[rank] = _refilled(values[rank], theirs[rank])
        values[self.world.rank] = value
        pairs = zip(ranks, values, strict=True)
        return [None if brought.is_idle else (brought.about, v) for brought, v in pairs]

    def _link(
        self, own: list[Tensor], tensors: list[list[Tensor]], check: Callable[[], None]
    ) -> list[list[Tensor]]:
        """The tensors of all ranks, with graphs; see the note above."""
        rank = self.world.rank
        others = [t for r, row in enumerate(tensors) if r != rank for t in row]
        like = [[torch.empty_like(t) for t in row] for row in tensors]
        # All ranks make this node, also where the calling code is under no_grad in one of them.
        with torch.inference_mode(False), torch.enable_grad():
            token = self._token
            token = torch.zeros((), requires_grad=True) if token is None else token
            self._token, *linked = _gather(token, self.world, like, check, others, *own)
        self._nodes.append(self._token.grad_fn)
        arrived = iter(linked)
        return [row if r == rank else [next(arrived) for _ in row] for r, row in enumerate(tensors)]

    def end_for(
        self, losses: Sequence[Tensor], keep_graph: bool, *, is_last: bool
    ) -> tuple[Tensor | None, bool]:
        """Where a backward of these losses must start as well, and whether it keeps the graph.

        Args:
            losses: this rank's.
            keep_graph: whether the caller keeps the graph.
            is_last: whether no other backward of the step follows. Else the ranks first agree
                whether any of these losses depends on other ranks, and on which of the gathers.
        """
        if self._token is None:
            return None, keep_graph
        if not is_last:
            reached = set().union(*self.world.gather(self._reached(losses)))
            if not reached:
                return None, keep_graph
            keep_graph = keep_graph or len(reached) < len(self._nodes)
        end = self._token
        if not keep_graph:
            self._nodes, self._token = [], None
        return end, keep_graph

    def _reached(self, losses: Sequence[Tensor]) -> list[int]:
        """The gathers that losses depend on, not through the tokens."""
        waiting, seen = [loss.grad_fn for loss in losses], set()
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            edges = node.next_functions[1:] if node in self._nodes else node.next_functions
            waiting.extend(before for before, _ in edges)
        return [i for i, node in enumerate(self._nodes) if node in seen]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        token: Tensor,
        world: World,
        like: list[list[Tensor]],
        check: Callable[[], None],
        others: list[Tensor],
        *own: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.world, ctx.like, ctx.check, ctx.own = world, like, check, len(own)
        return (token.clone(), *others)

    @staticmethod
    def backward(ctx: Any, _: Tensor | None, *gradients: Tensor | None) -> tuple[Any, ...]:
        ctx.check()
        if torch.is_grad_enabled():
            raise RuntimeError(
                "Expected no create_graph=True in a backward through a collective over several "
                "processes: gradients that come from other processes have no graph."
            )
        arrived = iter(gradients)
        sent: list[Tensor | None] = []
        for rank, row in enumerate(ctx.like):
            own = rank == ctx.world.rank
            sent += [None if own else _dense(next(arrived)) for _ in row]
        like = [t for row in ctx.like for t in row]
        sums = sum_over_ranks(sent, like, ctx.world)
        start = sum(len(row) for row in ctx.like[: ctx.world.rank])
        # An idle rank has brought nothing.
        mine = sums[start : start + len(ctx.like[ctx.world.rank])] or [None] * ctx.own
        return (None, None, None, None, None, *mine)


_gather: Callable[..., list[Tensor]] = _Gather.apply


def _refilled(node: Any, leaves: Sequence[Any]) -> Any:
    arrived = iter(leaves)
    return tree.map_leaves(lambda _: next(arrived), node)


def _has_graph(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad and torch.is_grad_enabled()


def _dense(gradient: Tensor | None) -> Tensor | None:
    """A copy that sums may be written to."""
    return None if gradient is None else gradient.to_dense().clone()
