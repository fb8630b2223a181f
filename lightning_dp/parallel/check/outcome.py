"""What a call came to, by name, and how far two calls of the same samples are apart."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_dp.parallel.scatter import tree


class Key(NamedTuple):
    """One value of a call.

    Kinds are "loss", "gradient", "log", "output", "metric", "logger", "option", and those of
    `Snapshot`: "parameter", "buffer", "list", "state".
    """

    kind: str
    name: str


UNCHANGED = "not set"
"""Stands for a missing value: this call did not write it."""


class Outcome:
    """All values of one call, in host memory.

    Attributes:
        gradient_norm: of all gradients together.

    Args:
        values: everything but gradients.
        gradients: the gradient of every trained parameter by name, None where it has none.
        like: an outcome to compare with; a gradient that is close to its gradient is kept as that,
            so that equal gradients take the memory once.
        tolerance: how close.
    """

    def __init__(
        self,
        values: Mapping[Key, Any],
        gradients: Iterable[tuple[str, Tensor | None]] = (),
        like: Outcome | None = None,
        tolerance: Tolerance | None = None,
    ) -> None:
        self.values: dict[Key, Any] = dict(values)
        self.gradient_norm: float = 0.0 if like is None else like.gradient_norm
        squares = 0.0
        for name, gradient in gradients:
            key = Key("gradient", name)
            own = None if gradient is None else _dense(gradient)
            if own is not None and like is None:
                squares += float(own.double().square().sum())
            if like is not None and tolerance is not None:
                other = like.values.get(key)
                if distance(other, own, tolerance, tolerance.of_gradients(like)) == 0:
                    own = other
            self.values[key] = own
        if like is None:
            self.gradient_norm = math.sqrt(squares)

    @property
    def loss(self) -> float | None:
        """The loss; None if there is none."""
        return self.values.get(Key("loss", ""))

    @property
    def is_finite(self) -> bool:
        """Whether the loss and all gradients are finite."""
        return math.isfinite(self.loss or 0.0) and math.isfinite(self.gradient_norm)

    def gradients(self) -> Iterator[tuple[Key, Tensor | None]]:
        """The gradients with their keys."""
        return ((key, value) for key, value in self.values.items() if key.kind == "gradient")


@dataclass(frozen=True)
class Tolerance:
    """The relative difference that rounding can make: half of the digits of a dtype."""

    relative: float
    eps: float

    @classmethod
    def of(cls, dtypes: Iterable[torch.dtype], device_type: str) -> Tolerance:
        """Of computations in these dtypes.

        GPUs that compute products with 10 bits of float32's 23 (TF32) have a hundredth.
        """
        eps = max([torch.finfo(dtype).eps for dtype in dtypes], default=0.0)
        cudnn: Any = torch.backends.cudnn
        kinds = cudnn.conv, cudnn.rnn, torch.backends.cuda.matmul
        is_short = device_type == "cuda" and "tf32" in [kind.fp32_precision for kind in kinds]
        return cls(float(max(eps**0.5, 1e-2 if is_short and eps > 1e-9 else 0.0)), eps)

    def of_gradients(self, outcome: Outcome) -> float:
        """By how much a gradient may differ in any case: one that cancels to 0 is all rounding."""
        return 10 * self.eps * outcome.gradient_norm


EXACT = Tolerance(0.0, 0.0)


def differing(alone: Outcome, split: Outcome, tolerance: Tolerance) -> dict[Key, float]:
    """The keys under which two outcomes differ by more than rounding, with the distance.

    A distance is relative; it is infinite where shapes or types differ or one value is missing.
    """
    found: dict[Key, float] = {}
    floor = tolerance.of_gradients(alone)
    for key in {**alone.values, **split.values}:
        a, b = alone.values.get(key, UNCHANGED), split.values.get(key, UNCHANGED)
        apart = distance(a, b, tolerance, floor if key.kind == "gradient" else 0.0)
        if apart:
            found[key] = apart
    return found


def distance(a: Any, b: Any, tolerance: Tolerance, floor: float = 0.0) -> float:
    """How far `b` is off `a`, relative to `a`; 0 if no further than rounding, or by `floor`."""
    if a is b:
        return 0.0
    if isinstance(a, Tensor | float | int) and isinstance(b, Tensor | float | int):
        return _numbers_apart(torch.as_tensor(a), torch.as_tensor(b), tolerance, floor)
    if type(a).__module__ == type(b).__module__ == "numpy" and _has_numbers(a) and _has_numbers(b):
        return _numbers_apart(torch.as_tensor(a), torch.as_tensor(b), tolerance, floor)
    parts_a, parts_b = tree.children(a), tree.children(b)
    if parts_a is None or parts_b is None:
        # Objects that do not say what they hold: of a class, that is all that is known.
        equality: Any = type(a).__eq__
        is_opaque = type(a) is type(b) and equality is object.__eq__
        return 0.0 if is_opaque or tree.equal(a, b) else math.inf
    if [key for key, _ in parts_a] != [key for key, _ in parts_b]:
        return math.inf
    pairs = zip(parts_a, parts_b, strict=True)
    return max((distance(x, y, tolerance, floor) for (_, x), (_, y) in pairs), default=0.0)


def _numbers_apart(a: Tensor, b: Tensor, tolerance: Tolerance, floor: float) -> float:
    if a.shape != b.shape:
        return math.inf
    if a.layout is not torch.strided or a.is_nested or b.is_nested or a.is_meta or b.is_meta:
        return 0.0
    if not a.numel() or torch.equal(a, b):
        return 0.0
    kind = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    x, y = a.to(kind), b.to(kind)
    finite = x.isfinite()
    odd = ~finite  # infinities and NaN have to be the same ones
    if not torch.equal(finite, y.isfinite()) or not _equal(x[odd], y[odd]):
        return math.inf
    off = float((x - y).abs()[finite].max()) if finite.any() else 0.0
    scale = float(x.abs()[finite].max()) if finite.any() else 0.0
    if off <= tolerance.relative * scale + floor:
        return 0.0
    return off / scale if scale else math.inf


def weighted_sum(outcomes: Sequence[Outcome], weights: Sequence[float]) -> Outcome:
    """Loss and gradients of the weighted sum of the losses of some outcomes."""
    pairs = [pair for pair in zip(weights, outcomes, strict=True) if pair[0]]
    loss = sum(weight * (outcome.loss or 0.0) for weight, outcome in pairs)
    keys = {key: None for _, outcome in pairs for key, _ in outcome.gradients()}
    joint = Outcome({Key("loss", ""): loss})
    for key in keys:
        terms = [(weight, outcome.values.get(key)) for weight, outcome in pairs]
        known = [weight * term.double() for weight, term in terms if term is not None]
        joint.values[key] = torch.stack(known).sum(0) if known else None
    return joint


def fitted_weights(whole: Outcome, parts: Sequence[Outcome]) -> list[float]:
    """The weights by which the parts' losses and gradients come nearest to those of the whole.

    Least squares over all gradients, with the loss as one more coordinate of as much weight.
    """
    scale = whole.gradient_norm**2 / whole.loss**2 if whole.loss and whole.gradient_norm else 1.0

    def dot(a: Outcome, b: Outcome) -> float:
        total = scale * (a.loss or 0.0) * (b.loss or 0.0)
        for key, gradient in a.gradients():
            other = b.values.get(key)
            if gradient is not None and other is not None:
                total += float(gradient.double().flatten() @ other.double().flatten())
        return total

    gram = torch.tensor([[dot(a, b) for b in parts] for a in parts], dtype=torch.float64)
    target = torch.tensor([dot(a, whole) for a in parts], dtype=torch.float64)
    solution: list[float] = (torch.linalg.pinv(gram, hermitian=True) @ target).tolist()
    return solution


def _equal(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def _has_numbers(array: Any) -> bool:
    """Whether a NumPy array or scalar has numbers or truth values, and no strings or objects."""
    return getattr(getattr(array, "dtype", None), "kind", "O") in "biufc"


def _dense(gradient: Tensor) -> Tensor:
    dense = gradient.detach().cpu().to_dense()
    return (torch.view_as_real(dense) if dense.is_complex() else dense).clone()
