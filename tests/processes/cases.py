"""Cases that one start of several processes runs one after another, each against one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from support.oracle import assert_equal_trees, loader, run
from support.processes import run_in_processes

METRICS = ("callback_metrics", "logged_metrics", "validated", "tested")


@dataclass(frozen=True)
class Case:
    """A module, which has to be some test file's own, and how it is trained."""

    make: Callable[[], LightningModule]
    strategy: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] | Callable[[], Mapping[str, Any]] = field(default_factory=dict)
    samples: int = 53

    @property
    def name(self) -> str:
        options = getattr(self.options, "__name__", self.options)
        make = getattr(self.make, "__name__", self.make)
        return f"{make}, {dict(self.strategy)}, {options}, {self.samples} samples"


def outcomes(cases: Sequence[Case], devices: int) -> list[dict[str, Any]]:
    """What each of the cases leaves behind."""
    torch.set_default_dtype(torch.float64)
    return [outcome(case, devices) for case in cases]


def outcome(case: Case, devices: int) -> dict[str, Any]:
    options = case.options() if callable(case.options) else case.options
    try:
        done = run(
            case.make,
            devices,
            strategy=dict(case.strategy) if devices > 1 else None,
            data=lambda: loader(case.samples),
            **{"max_epochs": 2, **options},
        )
    except BaseException as error:
        error.add_note(f"[in {case.name}]")
        raise
    return {
        "state": dict(done.module.state_dict()),
        "steps": (done.trainer.global_step, done.trainer.current_epoch),
        "predictions": done.predictions,
        **{name: getattr(done, name) for name in METRICS},
    }


def assert_as_on_one_device(
    cases: Sequence[Case],
    processes: int = 2,
    devices: int = 4,
    *,
    without_metrics: Sequence[Case] = (),
) -> None:
    """Runs the cases in processes that have so many devices together, and on one device."""
    several = run_in_processes(outcomes, processes, cases, devices, seconds=500)
    wrong = []
    for i, (case, expected) in enumerate(zip(cases, outcomes(cases, 1), strict=True)):
        for rank, all_of_one in enumerate(several):
            own = all_of_one[i]
            for name in ("state", "steps", *(() if case in without_metrics else METRICS)):
                what = f"{case.name}, process {rank}: {name}"
                try:
                    assert_equal_trees(own[name], expected[name], what, atol=1e-10, rtol=0.0)
                except AssertionError as error:
                    wrong.append(str(error))
    assert not wrong, "\n".join(wrong)
