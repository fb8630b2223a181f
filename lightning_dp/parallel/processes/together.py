"""Together: whether all processes have come to the same place of the program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class ProcessesApartError(RuntimeError):
    """The processes did not all come to the same collective."""


def check_together(told: Sequence[Any]) -> None:
    """Raises an error unless all processes have told something at the same place.

    Args:
        told: what they have told, in the order of the ranks. Of two things that are told at
            different places the attribute `what` differs, or only one has it.
    """
    places = [_place(value) for value in told]
    if len(set(places)) > 1:
        got = ", ".join(f"process {rank} {place}" for rank, place in enumerate(places))
        raise ProcessesApartError(
            f"Expected all processes at the same collective, got: {got}. Make the same calls in "
            "the same order in every process: they must not depend on its rank or its samples."
        )


def _place(value: Any) -> str:
    what = getattr(value, "what", None)
    return f"is at {what}" if isinstance(what, str) else "has ended its step"
