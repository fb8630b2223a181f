"""What torch's graphs keep of losses, by private names of torch."""

from __future__ import annotations

from typing import Any

from torch import Tensor

_MEAN = 1
"""torch's number of `reduction="mean"`."""

_NODES = ("NllLossBackward0", "NllLoss2DBackward0")
"""What makes the means of `cross_entropy` and `nll_loss`."""


def divisors_of_means(loss: Tensor) -> list[Tensor]:
    """What each mean of `cross_entropy` or `nll_loss` in a loss's graph was divided by.

    That is the sum of the weights of its targets; without class weights each counts 1, and ignored
    ones count nothing.

    Example:
        >>> import torch
        >>> scores = torch.zeros(3, 2, requires_grad=True)
        >>> weight, classes = torch.tensor([1.0, 5.0]), torch.tensor([0, 1, 1])
        >>> divisors_of_means(2 * torch.nn.functional.cross_entropy(scores, classes, weight))
        [tensor(11.)]
    """
    found: list[Tensor] = []
    nodes: list[Any] = [loss.grad_fn]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if node is None:
            continue
        if node.name() in _NODES and node._saved_reduction == _MEAN:
            found.append(node._saved_total_weight)
        for following, _ in node.next_functions:
            if following not in seen:
                seen.add(following)
                nodes.append(following)
    return found
