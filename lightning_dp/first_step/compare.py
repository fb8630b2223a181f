"""Comparing training steps: loss and gradient of the same samples, computed in two ways."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lightning_dp.metrics import is_metric
from lightning_dp.parallel.replicas import alike, keeps_state
from lightning_dp.parallel.torch_private import buffer_table


@dataclass(frozen=True)
class Outcome:
    """What a training step came to."""

    loss: float
    gradient: Tensor  # of all parameters as one vector, on the CPU; 0 where a parameter has none
    left: Mapping[str, Tensor] = field(default_factory=dict)  # in buffers, but for batch norm's

    @classmethod
    def of(cls, loss: Tensor, parameters: Sequence[Tensor], module: nn.Module) -> Outcome:
        """Takes a loss after its backward; gradients and buffers are copied."""
        nothing = torch.zeros(0, dtype=torch.float64)
        gradient = torch.cat([nothing, *map(_gradient_of, parameters)])
        return cls(float(loss.detach()), gradient, _state_of(module))

    def left_differently(self, other: Outcome, tolerance: float) -> list[str]:
        """The names of buffers in which the two have left different values."""
        return [
            name
            for name, value in self.left.items()
            if name not in other.left or not alike(value, other.left[name], tolerance)
        ]

    @property
    def is_finite(self) -> bool:
        """Whether the loss and all gradients are numbers."""
        return math.isfinite(self.loss) and bool(self.gradient.isfinite().all())


@dataclass(frozen=True)
class Difference:
    """How far an outcome a is off another one b: |a - b| / |b|, with norms over all parameters."""

    loss: float
    gradient: float

    @classmethod
    def between(cls, a: Outcome, b: Outcome) -> Difference:
        """How far `a` is off `b`."""
        off = a.gradient - b.gradient
        gradient = _ratio(float(off.norm()), float(b.gradient.norm()))
        return cls(_ratio(abs(a.loss - b.loss), abs(b.loss)), gradient)

    @property
    def largest(self) -> float:
        """The larger of the two; infinite if one is not a number."""
        return max(math.inf if math.isnan(x) else x for x in (self.loss, self.gradient))


def weighted_sum(outcomes: Sequence[Outcome], weights: Sequence[float]) -> Outcome:
    """The outcome of the weighted sum of the losses."""
    pairs = list(zip(weights, outcomes, strict=True))
    gradient = torch.stack([weight * outcome.gradient for weight, outcome in pairs]).sum(0)
    return Outcome(sum(weight * outcome.loss for weight, outcome in pairs), gradient)


def fitted_weights(whole: Outcome, parts: Sequence[Outcome]) -> list[float]:
    """The weights by which the parts' losses and gradients come nearest to those of the whole.

    Least squares over all gradients, and the loss as one more coordinate of as much weight.
    """
    scale = _ratio(float(whole.gradient @ whole.gradient), whole.loss**2)
    scale = scale if 0 < scale < math.inf else 1.0

    def dot(a: Outcome, b: Outcome) -> float:
        return float(a.gradient @ b.gradient) + scale * a.loss * b.loss

    gram = torch.tensor([[dot(a, b) for b in parts] for a in parts], dtype=torch.float64)
    target = torch.tensor([dot(a, whole) for a in parts], dtype=torch.float64)
    solution: list[float] = (torch.linalg.pinv(gram, hermitian=True) @ target).tolist()
    return solution


def _state_of(module: nn.Module) -> dict[str, Tensor]:
    """Buffers that may be state of a batch. Metrics have a replay of their own."""
    apart = {id(m) for metric in module.modules() if is_metric(metric) for m in metric.modules()}
    return {
        f"{path}.{name}".lstrip("."): buffer.detach().to("cpu", copy=True)
        for path, inner in module.named_modules()
        if keeps_state(inner) and id(inner) not in apart
        for name, buffer in buffer_table(inner).items()
        if buffer is not None and not buffer.is_meta
    }


def _gradient_of(parameter: Tensor) -> Tensor:
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    dense = gradient.detach().cpu().to_dense()
    return (torch.view_as_real(dense) if dense.is_complex() else dense).flatten().double()


def _ratio(a: float, b: float) -> float:
    """The quotient; nothing is no part of nothing."""
    if b == 0:
        return 0.0 if a == 0 else math.inf
    return a / b
