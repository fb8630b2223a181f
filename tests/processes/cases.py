"""Cases that one start of several processes runs one after another, each against one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from support.oracle import assert_equal_trees, loader, run
from support.processes import run_in_processes


@dataclass(frozen=True)
class Case:
    """A module, which has to be some test file's own, and how it is trained."""

    make: Callable[[], LightningModule]
    strategy: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-10

    @property
    def name(self) -> str:
        return f"{self.make.__name__}, {dict(self.strategy)}, {dict(self.options)}"


def outcomes(cases: Sequence[Case], devices: int, samples: int) -> list[dict[str, Any]]:
    """What each of the cases leaves behind."""
    torch.set_default_dtype(torch.float64)
    return [outcome(case, devices, samples) for case in cases]


def outcome(case: Case, devices: int, samples: int) -> dict[str, Any]:
    strategy = dict(case.strategy) if devices > 1 else None
    try:
        done = run(
            case.make, devices, strategy=strategy, data=lambda: loader(samples), **case.options
        )
    except BaseException as error:
        error.add_note(f"[in {case.name}]")
        raise
    return {
        "state": dict(done.module.state_dict()),
        "steps": (done.trainer.global_step, done.trainer.current_epoch),
        "predictions": done.predictions,
        "metrics": (done.callback_metrics, done.logged_metrics, done.validated, done.tested),
    }


def assert_as_on_one_device(
    cases: Sequence[Case], processes: int, devices: int, samples: int
) -> None:
    """Runs the cases in processes that have so many devices together, and on one device."""
    several = run_in_processes(outcomes, processes, cases, devices, samples, seconds=500)
    wrong = []
    for i, (case, expected) in enumerate(zip(cases, outcomes(cases, 1, samples), strict=True)):
        for rank, own in enumerate(several):
            for name in ("state", "steps", "metrics"):
                what = f"{case.name}, process {rank}: {name}"
                try:
                    close = {"atol": case.tolerance, "rtol": 0.0}
                    assert_equal_trees(own[i][name], expected[name], what, **close)
                except AssertionError as error:
                    wrong.append(str(error))
    assert not wrong, "\n".join(wrong)
