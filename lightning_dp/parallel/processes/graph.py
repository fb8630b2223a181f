"""The autograd graph of a step that continues in other ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from lightning_dp.parallel.processes.world import World
from lightning_dp.parallel.scatter import to_device, tree

Check: TypeAlias = Callable[[], None]
# [Note: one autograd graph over several ranks]
# A differentiable all_gather is a node in every rank's graph. In the forward it returns the other
# ranks' tensors; in the backward all ranks add up the gradients of all tensors, and each takes the
# sums of its own. So every rank's backward must come to all nodes, in the same order. Therefore
# each node depends on the one before through a token, and the backward starts at the last token
# beside the loss: also in a rank whose loss uses nothing of the others, or weighs nothing.


class _Contribution(NamedTuple):
    """What one rank sends in a collective.

    Attributes:
        sizes_and_order: of its replicas' samples.
        value: with tensors on the CPU, without graphs; None from an idle rank.
        graphs: which of its leaves have a graph.
        is_idle: whether the others get nothing from it.
    """

    sizes_and_order: Any
    value: Any
    graphs: list[int]
    is_idle: bool


class RankGraph:
    """The differentiable all_gathers of one step.

    Args:
        world: the processes.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self._token: Tensor | None = None

    @property
    def is_used(self) -> bool:
        """Whether the graph continues in other ranks."""
        return self._token is not None

    def all_gather(
        self, what: str, sizes_and_order: Any, value: Any, *, is_idle: bool, check: Check
    ) -> list[tuple[Any, Any] | None]:
        """Every rank's (sizes_and_order, value), in the order of the ranks; None for an idle one.

        Others' tensors are on the CPU; their gradients flow back. This rank's value stays as it is.

        Args:
            what: the collective's name.
            sizes_and_order: of the samples of this rank's replicas; not a part of the graph.
            value: a tree of tensors and others.
            is_idle: whether the others get nothing from this rank.
            check: called in the backward; raises where gradients must not leave this rank.
        """
        on_cpu = to_device(value, torch.device("cpu"))
        leaves = tree.leaves(on_cpu)
        graphs = [i for i, leaf in enumerate(leaves) if _has_graph(leaf)]
        local: tuple[Any, list[int]] = (None, []) if is_idle else (on_cpu, graphs)
        ranks = self.world.all_gather_objects(_Contribution(sizes_and_order, *local, is_idle), what)
        values = [sent.value for sent in ranks]
        if any(sent.graphs for sent in ranks):
            theirs = [tree.leaves(sent.value) for sent in ranks]
            tensors = [[t[i] for i in b.graphs] for b, t in zip(ranks, theirs, strict=True)]
            linked = self._link([leaves[i] for i in graphs], tensors, check)
            for rank, (sent, new) in enumerate(zip(ranks, linked, strict=True)):
                for i, tensor in zip(sent.graphs, new, strict=True):
                    theirs[rank][i] = tensor
                values[rank] = _refilled(values[rank], theirs[rank])
        values[self.world.rank] = value
        pairs = zip(ranks, values, strict=True)
        return [None if sent.is_idle else (sent.sizes_and_order, v) for sent, v in pairs]

    def _link(
        self, local: list[Tensor], tensors: list[list[Tensor]], check: Check
    ) -> list[list[Tensor]]:
        """The tensors of all ranks, with graphs; see the note above."""
        rank = self.world.rank
        others = [t for r, row in enumerate(tensors) if r != rank for t in row]
        like = [[torch.empty_like(t) for t in row] for row in tensors]
        # All ranks make this node, also where the calling code is under no_grad in one of them.
        with torch.inference_mode(False), torch.enable_grad():
            token = self._token
            token = torch.zeros((), requires_grad=True) if token is None else token
            self._token, *linked = _all_gather(token, self.world, like, check, others, *local)
        arrived = iter(linked)
        return [row if r == rank else [next(arrived) for _ in row] for r, row in enumerate(tensors)]

    def end(self, *, keep_graph: bool) -> Tensor | None:
        """Where every backward of the step must start as well; None if it stays in this rank."""
        end = self._token
        if not keep_graph:
            self._token = None
        return end


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        token: Tensor,
        world: World,
        like: list[list[Tensor]],
        check: Check,
        others: list[Tensor],
        *local: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.world, ctx.like, ctx.check, ctx.local = world, like, check, len(local)
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
            is_local = rank == ctx.world.rank
            sent += [None if is_local else _dense(next(arrived)) for _ in row]
        sums = ctx.world.sum(sent, [t for row in ctx.like for t in row])
        start = sum(len(row) for row in ctx.like[: ctx.world.rank])
        # An idle rank has sent nothing.
        mine = sums[start : start + len(ctx.like[ctx.world.rank])] or [None] * ctx.local
        return (None, None, None, None, None, *mine)


_all_gather: Callable[..., Sequence[Any]] = _AllGather.apply


def _refilled(node: Any, leaves: Sequence[Any]) -> Any:
    arrived = iter(leaves)
    return tree.map_leaves(lambda _: next(arrived), node)


def _has_graph(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad and torch.is_grad_enabled()


def _dense(gradient: Tensor | None) -> Tensor | None:
    """A copy that sums may be written to."""
    return None if gradient is None else gradient.to_dense().clone()
