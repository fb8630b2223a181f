"""What a check has found, in words."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lightning_dp.parallel.check.outcome import UNCHANGED, Key
from lightning_dp.parallel.split import Sizes

log = logging.getLogger("lightning_dp")

KNOWN = ("batch norm", "random")
"""Causes that every data-parallel trainer has: one line at INFO, no warning."""

_NAMED = 4
"""Values of one kind that are named; of more only the number is given."""


@dataclass(frozen=True)
class Difference:
    """One value that a split call does not have in common with one device."""

    key: Key
    alone: Any
    split: Any

    def text(self, devices: int) -> str:
        """Both values, as far as they fit a line."""
        a, b = _short(self.alone), _short(self.split)
        if a == b and all(isinstance(v, Tensor | float) for v in (self.alone, self.split)):
            x, y = (torch.as_tensor(v).to(torch.complex128) for v in (self.alone, self.split))
            return f"values differ by up to {float((x - y).abs().max()):.3g}"
        return f"{a} on one device, {b} on {devices} devices"


@dataclass(frozen=True)
class Report:
    """What the comparison of a call on one device and split over several has found.

    Attributes:
        option: the option that asks for the check, for messages.
        name: what was called.
        sizes: how many samples each device had.
        differences: the values that differ, beyond rounding and chance.
        causes: why, each with what to write instead. "batch norm" and "random" are known from every
            data-parallel trainer; they are no mistake.
        skipped: why nothing was compared; empty if it was.
        raised: whether that was an error in the check.
    """

    option: str = "check_first_step"
    name: str = ""
    sizes: Sizes = ()
    differences: Sequence[Difference] = ()
    causes: dict[str, str] = field(default_factory=dict)
    skipped: str = ""
    raised: bool = False

    def not_compared(self, why: str, *, raised: bool = False) -> Report:
        """The report of the same call where nothing was compared."""
        return replace(self, skipped=why, raised=raised)

    @property
    def is_same(self) -> bool:
        """Whether both gave the same numbers, but for what every data-parallel trainer has."""
        return not (self.skipped or self.differences)

    @property
    def known(self) -> dict[str, str]:
        """The causes that are no mistake."""
        return {cause: text for cause, text in self.causes.items() if cause in KNOWN}

    def __str__(self) -> str:
        """The message, one line or one with a list."""
        if self.skipped:
            return f"{self.option}: {self.name} was not compared with one device: {self.skipped}"
        used = [size for size in self.sizes if size]
        cut = f"the first {sum(used)} samples, split as {', '.join(map(str, used))}"
        if not self.differences:
            known = [f"; but: {text.rstrip('.')}" for text in self.known.values()]
            same = f"{self.option}: {self.name} gives the numbers of one device on {cut}"
            return f"{same}{''.join(known)}."
        lines = [f"{self.option}: on {cut}, {self.name} does not give the numbers of one device."]
        lines += [text for cause, text in self.causes.items() if cause not in KNOWN]
        for (kind, name), text in self._values(len(used)):
            lines.append(f"{_WHAT[kind].format(name)}: {text}")
        lines += list(self.known.values())
        lines.append(f"({self.option}=False turns this check off.)")
        return "\n- ".join(lines[:-1]) + "\n" + lines[-1]

    def _values(self, devices: int) -> list[tuple[Key, str]]:
        """The values that differ: all gradients together, and the first ones of other kinds."""
        lines, counts = [], dict.fromkeys((d.key.kind for d in self.differences), 0)
        for difference in self.differences:
            kind = difference.key.kind
            counts[kind] += 1
            if counts[kind] <= (1 if kind == "gradient" else _NAMED):
                lines.append((difference.key, difference.text(devices)))
        for kind, count in counts.items():
            shown = 1 if kind == "gradient" else _NAMED
            if count > shown:
                at = max(i for i, (key, _) in enumerate(lines) if key.kind == kind)
                key, text = lines[at]
                lines[at] = key, f"{text}; and {count - shown} more"
        return lines


def announce(
    report: Report, *, asked: bool, info: Callable[[str], object] = log.info, stacklevel: int = 3
) -> None:
    """Warns of a difference; says the rest at INFO or DEBUG.

    Args:
        report: the report.
        asked: whether the user asked for the check; else its success is not worth a line at INFO.
        info: says a line at INFO.
        stacklevel: of the caller, for the warning.
    """
    if report.differences:
        warnings.warn(str(report), stacklevel=stacklevel)
    elif asked or report.raised or report.known:
        info(str(report))
    else:
        log.debug("%s", report)


_WHAT = {
    "loss": "the loss",
    "gradient": "the gradient of {}",
    "log": "self.log({!r})",
    "metric": "the state of metric {}",
    "output": "output{}",
    "list": "the items of {}",
    "state": "{}",
    "buffer": "buffer {}",
    "parameter": "parameter {}",
    "logger": "calls of self.logger.{}",
    "option": "option {}",
}
"""What values of each kind are called in a message."""


def _short(value: Any) -> str:
    """A value, at most as long as a few words."""
    if value is None:
        return "None"
    if isinstance(value, str) and value == UNCHANGED:
        return value
    if isinstance(value, Tensor):
        if value.numel() == 1:
            return f"{float(value):.6g}" if value.is_floating_point() else str(value.item())
        norm = f", norm {float(value.double().norm()):.4g}" if value.is_floating_point() else ""
        return f"shape {tuple(value.shape)}{norm}"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple | dict) and len(value) > 3:
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_short, value)) + "]"
    text = repr(value)
    return text if len(text) < 60 else text[:57] + "..."
