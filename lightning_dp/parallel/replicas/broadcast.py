"""Broadcast: the root's tensors inside a replica's graph, so that gradients find their way back.

A replica's own parameters are leaves: right for a step, whose gradients the engine sums. In forward
mode the graph goes on outside of the replicas, and its end is autograd's business alone: any
backward, `torch.autograd.grad` and second derivatives must reach the root's parameters, whose
hooks then see one sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_dp.parallel.links import gradients_on
from lightning_dp.parallel.torch_private import gradient_hooks


def broadcast(
    roots: Sequence[Tensor], twins: Sequence[Tensor], on_backward: Callable[[], None]
) -> list[Tensor]:
    """Functions of the root's tensors in the memory of their twins; twins that are not trained.

    In every backward that comes through here `on_backward` is called.
    """
    tensors: list[Tensor] = list(twins)
    for group in _groups(roots):
        aliases = _aliases([twins[i] for i in group], on_backward, *(roots[i] for i in group))
        for i, alias in zip(group, aliases, strict=True):
            # Tensors with a graph refuse to be copied; what a forward copies are the parameters.
            alias.__dict__["__deepcopy__"] = twins[i].__deepcopy__
            tensors[i] = alias
    return tensors


def _groups(roots: Sequence[Tensor]) -> list[list[int]]:
    """Which trained parameters share a node: all, but some stand alone.

    A node hands None to the parameters that a step did not use. Autograd passes that over where it
    accumulates. But it calls hooks with it, which would not be called on one device; and where a
    weight is computed, as in a functional call, it goes on, and uses up that graph.
    """
    trained = {i: root for i, root in enumerate(roots) if root.requires_grad}
    alone = {i for i, root in trained.items() if gradient_hooks(root) or not root.is_leaf}
    together = [i for i in trained if i not in alone]
    return [*([i] for i in alone), *([together] if together else [])]


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, twins: list[Tensor], on_backward: Callable[[], None], *roots: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # None stays None: AdamW moves parameters that get zeros
        ctx.device, ctx.on_backward = roots[0].device, on_backward
        return tuple(twin.detach() for twin in twins)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        ctx.on_backward()
        return None, None, *gradients_on(ctx.device, list(gradients))


_aliases: Callable[..., tuple[Tensor, ...]] = _Broadcast.apply
