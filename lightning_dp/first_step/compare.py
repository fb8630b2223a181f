"""What is compared, how closely, and in which words a difference is reported."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from lightning_dp.parallel.checks import short_repr
from lightning_dp.parallel.scatter import tree
from lightning_dp.parallel.split import Sizes

log = logging.getLogger("lightning_dp")

NAMES = {
    "loss": "the loss",
    "gradient": "the gradient of {}",
    "log": "self.log({!r})",
    "output": "output{}",
    "list": "the items of {}",
    "state": "{}",
    "attribute": "{}",
    "buffer": "buffer {}",
    "parameter": "parameter {}",
    "logger": "calls of self.logger.{}",
}
"""The kinds of values that are compared, as a message names and orders them."""

KNOWN = ("batch norm", "random")
"""Causes that every data-parallel trainer has: one line at INFO, no warning."""

_SHOWN = 4
"""Values of one kind that a message lists; of gradients it lists one."""


class Key(NamedTuple):
    """One value of a call: its kind, one of `NAMES`, and which of that kind."""

    kind: str
    name: str = ""


LOSS = Key("loss")
Values: TypeAlias = dict[Key, Any]
"""All values of one call, on the CPU; a gradient is None where a parameter has none."""
UNCHANGED = "not set"
"""Stands for a value that a call does not have."""


# How closely


def gradient_norm(values: Values) -> float:
    """The norm of all gradients together."""
    gradients = [v for key, v in values.items() if key.kind == "gradient" and v is not None]
    return math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))


def is_finite(values: Values) -> bool:
    """Whether the loss and all gradients are finite."""
    return math.isfinite(gradient_norm(values) + values.get(LOSS, 0.0))


def products(calls: Sequence[Values]) -> Tensor:
    """The products of the gradients of each call with those of each, as a square matrix.

    The loss is one more coordinate, with as much weight as the first call's gradients.
    """
    norm, loss = gradient_norm(calls[0]), calls[0].get(LOSS)
    scale = norm**2 / loss**2 if loss and norm else 1.0

    def product(a: Values, b: Values) -> float:
        total = scale * a.get(LOSS, 0.0) * b.get(LOSS, 0.0)
        for key, gradient in a.items():
            other = b.get(key)
            if key.kind == "gradient" and gradient is not None and other is not None:
                total += float(gradient.double().flatten() @ other.double().flatten())
        return float(total)

    return torch.tensor([[product(a, b) for b in calls] for a in calls], dtype=torch.float64)


def rounding(dtypes: Iterable[torch.dtype], device_type: str) -> float:
    """The relative rounding error of computations in these dtypes.

    On GPUs that compute products with 10 bits of float32's 23 (TF32) it is larger.
    """
    eps = max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)
    if device_type != "cuda" or eps < 1e-9:
        return eps
    cudnn: Any = torch.backends.cudnn
    matmul: Any = torch.backends.cuda.matmul
    if not hasattr(cudnn, "conv"):  # torch 2.8
        return max(eps, 1e-4) if cudnn.allow_tf32 or matmul.allow_tf32 else eps
    precisions = [kind.fp32_precision for kind in (cudnn.conv, cudnn.rnn, matmul)]
    return max(eps, 1e-4) if "tf32" in precisions else eps


def differing(alone: Values, split: Values, eps: float) -> dict[Key, float]:
    """The keys under which two calls differ by more than rounding, with their `distance`."""
    rest = 10 * eps * gradient_norm(alone)  # a gradient that cancels to 0 is all rounding
    found = {}
    for key in {**alone, **split}:
        a, b = alone.get(key, UNCHANGED), split.get(key, UNCHANGED)
        found[key] = distance(a, b, eps, rest if key.kind == "gradient" else 0.0)
    return {key: apart for key, apart in found.items() if apart}


def distance(a: Any, b: Any, eps: float = 0.0, floor: float = 0.0) -> float:
    """How far `b` is off `a`, relative to the largest entry of `a`; inf if shapes or types differ.

    Returns 0 if the largest difference is at most sqrt(eps) times the largest entry of `a`, plus
    `floor`. Of containers it is the largest of their leaves.
    """
    places_a, places_b = tree.places(a), tree.places(b)
    if [path for path, _ in places_a] != [path for path, _ in places_b]:
        return math.inf
    pairs = zip(places_a, places_b, strict=True)
    return max((_leaves_apart(x, y, eps, floor) for (_, x), (_, y) in pairs), default=0.0)


def _leaves_apart(a: Any, b: Any, eps: float, floor: float) -> float:
    if a is b:
        return 0.0
    if not (_is_number(a) and _is_number(b)):
        # Objects without an `__eq__` cannot be compared: those of one class are taken as equal.
        equality: Any = type(a).__eq__
        is_opaque = type(a) is type(b) and equality is object.__eq__
        return 0.0 if is_opaque or tree.equal(a, b) else math.inf
    x, y = torch.as_tensor(a), torch.as_tensor(b)
    if x.shape != y.shape:
        return math.inf
    if any(t.layout is not torch.strided or t.is_nested or t.is_meta for t in (x, y)):
        return 0.0
    dtype = torch.complex128 if x.is_complex() or y.is_complex() else torch.float64
    x, y = x.to(dtype), y.to(dtype)
    finite = x.isfinite()
    others = x[~finite], y[~finite]  # infinities and NaN have to be the same ones
    if not finite.equal(y.isfinite()) or not torch.allclose(*others, equal_nan=True):
        return math.inf
    if not finite.any():
        return 0.0
    off, scale = float((x - y)[finite].abs().max()), float(x[finite].abs().max())
    if off <= eps**0.5 * scale + floor:
        return 0.0
    return off / scale if scale else math.inf


def _is_number(value: Any) -> bool:
    """Whether it is a number, a tensor, or a NumPy array or scalar of numbers or truth values."""
    is_of_numbers = tree.is_array(value) and value.dtype.kind in "biufc"
    return is_of_numbers or isinstance(value, Tensor | float | int)


# In which words


@dataclass
class Report:
    """What the comparison of a call on one device and split over several has found.

    Attributes:
        option: the option that asks for the check, for messages.
        name: what was called.
        sizes: how many samples each device had.
        differences: the values that differ beyond rounding and chance: on one device, and split.
        causes: why, each with what to write instead; those in `KNOWN` are no mistake.
        skipped: why nothing was compared; empty if it was.
        raised: whether that was an error in the check.
    """

    option: str
    name: str
    sizes: Sizes = ()
    differences: dict[Key, tuple[Any, Any]] = field(default_factory=dict)
    causes: dict[str, str] = field(default_factory=dict)
    skipped: str = ""
    raised: bool = False

    @property
    def is_same(self) -> bool:
        """Whether both gave the same numbers, but for what every data-parallel trainer has."""
        return not (self.skipped or self.differences)

    @property
    def known(self) -> list[str]:
        """The causes that are no mistake."""
        return [text for cause, text in self.causes.items() if cause in KNOWN]

    def __str__(self) -> str:
        """The message, one line or one with a list."""
        if self.skipped:
            return f"{self.option}: {self.name} was not compared with one device: {self.skipped}"
        used = [size for size in self.sizes if size]
        cut = f"the first {sum(used)} samples, split as {', '.join(map(str, used))}"
        if not self.differences:
            but = "".join(f", but for this: {text.rstrip('.')}" for text in self.known)
            return f"{self.option}: {self.name} gives the numbers of one device on {cut}{but}."
        lines = [f"{self.option}: on {cut}, {self.name} does not give the numbers of one device."]
        lines += [text for cause, text in self.causes.items() if cause not in KNOWN]
        for kind, group in groupby(self.differences, lambda key: key.kind):
            keys = list(group)
            shown = keys[: 1 if kind == "gradient" else _SHOWN]
            for key in shown:
                alone, split = map(_short, self.differences[key])
                name = NAMES[kind].format(key.name)
                lines.append(f"{name}: {alone} on one device, {split} on {len(used)} devices")
            if len(keys) > len(shown):
                lines[-1] += f"; and {len(keys) - len(shown)} more"
        return "\n- ".join(lines + self.known) + f"\n({self.option}=False turns this check off.)"


def announce(
    report: Report, *, asked: bool, info: Callable[[str], object] = log.info, stacklevel: int = 3
) -> None:
    """Warns of a difference, with the caller's `stacklevel`; says the rest at INFO or DEBUG.

    Success is worth a line at INFO if the user has `asked` for the check.
    """
    if report.differences:
        warnings.warn(str(report), stacklevel=stacklevel)
    elif asked or report.raised or report.known:
        info(str(report))
    else:
        log.debug("%s", report)


def _short(value: Any) -> str:
    """A value, at most as long as a few words."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, Tensor):
        norm = f", norm {float(value.double().norm()):.9g}" if value.is_floating_point() else ""
        return f"shape {tuple(value.shape)}{norm}"
    if isinstance(value, list | tuple | dict):
        return f"a {type(value).__name__} of {len(value)}"
    if value is UNCHANGED:
        return UNCHANGED
    return f"{value:.9g}" if isinstance(value, float) else short_repr(value)
