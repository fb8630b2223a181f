"""Why a law about all devices does not hold: a wait that is missing, or one of the devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from lightning_dp.doctor.bench import Bench, synchronize
from lightning_dp.doctor.law import Law, SkippedLaw

MISSING_WAIT = "a missing wait"


def culprits_of(bench: Bench, law: Law, named: tuple[str, ...]) -> tuple[str, ...]:
    """Says why a law does not hold, by looking at it again without one possible cause at a time.

    If it holds when everything is waited for, a wait is missing. Else, if it holds for the root
    with some of the other devices and not with the rest, those of the rest are at fault. If it
    holds with none of them, that says nothing.

    Args:
        bench: the devices.
        law: the law.
        named: the devices or links that the law has found to be off itself. They may be in order,
            and have been read too early.
    """
    if bench.root.type != "cpu" and _holds_when_all_is_waited_for(bench, law):
        return (MISSING_WAIT,)
    if named or law.is_about_parts:
        return named
    others = [device for device in bench.distinct if device != bench.root]
    off = [device for device in others if not _holds(bench.afresh([bench.root, device]), law)]
    return tuple(map(str, off)) if off != others else ()


def is_race(error: BaseException) -> bool:
    """Whether simulated devices have seen two accesses that nothing orders."""
    kind: Any = getattr(getattr(torch, "sim", None), "RaceError", ())
    return isinstance(error, kind)


def _holds(bench: Bench, law: Law) -> bool:
    try:
        return law.look(bench).holds
    except SkippedLaw:
        return True
    except Exception:  # an error, too, is a law that does not hold
        return False


def _holds_when_all_is_waited_for(bench: Bench, law: Law) -> bool:
    with _WaitingForAll(bench.distinct):
        return _holds(bench.afresh(), law)


class _WaitingForAll(TorchFunctionMode):
    """Before and after everything that is called, all devices are through with all work."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        super().__init__()
        self._devices = list(devices)

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        synchronize(self._devices)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            synchronize(self._devices)
