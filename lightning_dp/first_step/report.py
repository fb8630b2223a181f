"""What a check has found, in words."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

from torch import Tensor

from lightning_dp.first_step.compare import UNCHANGED, Key
from lightning_dp.parallel.split import Sizes

log = logging.getLogger("lightning_dp")

KNOWN = ("batch norm", "random")
"""Causes that every data-parallel trainer has: one line at INFO, no warning."""

NAMES = {
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
"""What values of each kind are called in a message, in the order in which they are listed."""

_SHOWN = 4
"""Values of one kind that are named; of more only the number is given."""


class Difference(NamedTuple):
    """One value that a split call does not have in common with one device."""

    key: Key
    alone: Any
    split: Any

    def text(self, devices: int) -> str:
        """Both values, as far as they fit a line."""
        name, a, b = NAMES[self.key.kind].format(self.key.name), *map(_short, self[1:])
        return f"{name}: {a} on one device, {b} on {devices} devices"


@dataclass(frozen=True)
class Report:
    """What the comparison of a call on one device and split over several has found.

    Attributes:
        option: the option that asks for the check, for messages.
        name: what was called.
        sizes: how many samples each device had.
        differences: the values that differ, beyond rounding and chance.
        causes: why, each with what to write instead; those in `KNOWN` are no mistake.
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
            same = f"{self.option}: {self.name} gives the numbers of one device on {cut}"
            return same + "".join(f"; but: {text.rstrip('.')}" for text in self.known) + "."
        lines = [f"{self.option}: on {cut}, {self.name} does not give the numbers of one device."]
        lines += [text for cause, text in self.causes.items() if cause not in KNOWN]
        for kind, group in groupby(self.differences, lambda difference: difference.key.kind):
            differences = list(group)
            shown = differences[: 1 if kind == "gradient" else _SHOWN]
            lines += [difference.text(len(used)) for difference in shown]
            if len(differences) > len(shown):
                lines[-1] += f"; and {len(differences) - len(shown)} more"
        return "\n- ".join(lines + self.known) + f"\n({self.option}=False turns this check off.)"


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


def _short(value: Any) -> str:
    """A value, at most as long as a few words."""
    if value is UNCHANGED:
        return str(value)
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, Tensor):
        norm = f", norm {float(value.double().norm()):.9g}" if value.is_floating_point() else ""
        return f"shape {tuple(value.shape)}{norm}"
    if isinstance(value, list | tuple | dict):
        return f"a {type(value).__name__} of {len(value)}"
    text = f"{value:.9g}" if isinstance(value, float) else repr(value)
    return text if len(text) < 60 else text[:57] + "..."
