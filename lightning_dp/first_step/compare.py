"""Comparing training steps: loss and gradient of the same samples, computed in two ways."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Outcome:
    """What a training step came to.

    Attributes:
        loss: its value.
        gradients: of every parameter, on the CPU; None where there is none.
    """

    loss: float
    gradients: list[Tensor | None]

    @classmethod
    def of(cls, loss: Tensor, parameters: Sequence[nn.Parameter]) -> Outcome:
        """Takes a loss after its backward; the gradients are copied."""
        gradients = [None if p.grad is None else p.grad.to("cpu", copy=True) for p in parameters]
        plain = [None if g is None else _plain(g) for g in gradients]
        return cls(float(loss.detach().cpu()), plain)

    @property
    def is_finite(self) -> bool:
        """Whether the loss and all gradients are numbers."""
        return math.isfinite(self.loss) and math.isfinite(_dot(self.gradients, self.gradients))


@dataclass(frozen=True)
class Difference:
    """How far one outcome is off another one, relative to that.

    Attributes:
        loss: |a - b| / |b|.
        gradient: the same with norms over all parameters.
    """

    loss: float
    gradient: float

    @classmethod
    def between(cls, a: Outcome, b: Outcome) -> Difference:
        """How far `a` is off `b`."""
        pairs = zip(a.gradients, b.gradients, strict=True)
        off = [_minus(x, y) for x, y in pairs]
        gradient = _ratio(_dot(off, off), _dot(b.gradients, b.gradients)) ** 0.5
        return cls(_ratio(abs(a.loss - b.loss), abs(b.loss)), gradient)

    @property
    def largest(self) -> float:
        """The larger of the two; infinite if one is not a number."""
        return max(math.inf if math.isnan(x) else x for x in (self.loss, self.gradient))


def weighted_sum(outcomes: Sequence[Outcome], weights: Sequence[float]) -> Outcome:
    """The outcome of the weighted sum of the losses."""
    gradients = [
        _sum(parts, weights) for parts in zip(*(o.gradients for o in outcomes), strict=True)
    ]
    losses = [outcome.loss for outcome in outcomes]
    return Outcome(sum(w * x for w, x in zip(weights, losses, strict=True)), gradients)


def fitted_weights(whole: Outcome, parts: Sequence[Outcome]) -> list[float]:
    """The weights by which the parts' losses and gradients come nearest to those of the whole.

    Least squares over all gradients, and the loss as one more coordinate of as much weight.
    """
    scale = _ratio(_dot(whole.gradients, whole.gradients), whole.loss**2)
    scale = scale if 0 < scale < math.inf else 1.0

    def dot(a: Outcome, b: Outcome) -> float:
        return _dot(a.gradients, b.gradients) + scale * a.loss * b.loss

    gram = torch.tensor([[dot(a, b) for b in parts] for a in parts], dtype=torch.float64)
    target = torch.tensor([dot(a, whole) for a in parts], dtype=torch.float64)
    solution: list[float] = (torch.linalg.pinv(gram, hermitian=True) @ target).tolist()
    return solution


def _plain(gradient: Tensor) -> Tensor:
    dense = gradient.to_dense() if gradient.layout is not torch.strided else gradient
    return torch.view_as_real(dense) if dense.is_complex() else dense


def _dot(a: Sequence[Tensor | None], b: Sequence[Tensor | None]) -> float:
    products = [
        torch.dot(x.flatten().double(), y.flatten().double()).item()
        for x, y in zip(a, b, strict=True)
        if x is not None and y is not None
    ]
    return math.fsum(products)


def _minus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a.double() - b.double()


def _sum(parts: Sequence[Tensor | None], weights: Sequence[float]) -> Tensor | None:
    terms = [w * x.double() for w, x in zip(weights, parts, strict=True) if x is not None]
    return torch.stack(terms).sum(0) if terms else None


def _ratio(a: float, b: float) -> float:
    """The quotient; nothing is no part of nothing."""
    if b == 0:
        return 0.0 if a == 0 else math.inf
    return a / b
