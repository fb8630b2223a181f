"""What a law is, and what becomes of one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from lightning_dp.doctor.bench import Bench

Verdict = Literal["pass", "fail", "skip"]


class SkippedLaw(Exception):
    """Says why a law cannot be looked at on these devices."""


@dataclass(frozen=True)
class Finding:
    """What one look at a law has shown.

    Args:
        difference: how far it is off, as a relative difference unless `remark` says otherwise.
        allowed: up to which it is rounding; 0 where nothing is rounded.
        culprits: the devices or links that are off, where the look itself tells.
        remark: what else there is to say.
    """

    difference: float = 0.0
    allowed: float = 0.0
    culprits: tuple[str, ...] = ()
    remark: str = ""

    @property
    def holds(self) -> bool:
        """Whether the law does; what is not a number is off."""
        return self.difference <= self.allowed and not self.culprits


@dataclass(frozen=True)
class Law:
    """Something that holds on devices that are in order.

    Args:
        name: as the report has it, and `--only`.
        look: looks at it; an exception is a failure.
        is_about_parts: whether it looks at single devices and links, and so names them by itself.
    """

    name: str
    look: Callable[[Bench], Finding]
    is_about_parts: bool = False


@dataclass(frozen=True)
class Result:
    """What became of a law."""

    law: str
    verdict: Verdict
    difference: float | None = None
    allowed: float | None = None
    culprits: tuple[str, ...] = field(default=())
    remark: str = ""
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """As it is in the file; JSON has no NaN and no infinity."""
        content = asdict(self)
        if self.difference is not None and not math.isfinite(self.difference):
            content["difference"] = str(self.difference)
        return content


def worst(differences: Iterable[float]) -> float:
    """The largest difference; infinite if one is not a number, 0 of none."""
    return max((math.inf if math.isnan(d) else d for d in differences), default=0.0)
