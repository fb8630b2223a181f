"""The kinds of devices that this process tests on, and what a test says about those it needs.

torch has one accelerator in a process, so simulated devices and GPUs are tested in two:
`python -m pytest` has "cpu" and "sim", and `python -m pytest --on cuda` has "cpu", "cuda" (one GPU,
K times) and "multigpu" (K GPUs).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
import sim_devices
import torch

SIM_DEVICES = 8  # their number is fixed for a process
ALL = ("cpu", "sim", "cuda", "multigpu")
SEPARATE = ("sim", "multigpu")
"""The kinds where each replica has a device, with a memory, of its own."""
ACCELERATORS = ("sim", "cuda", "multigpu")
NO_SIM = ("cpu", "cuda", "multigpu")
"""For what simulated devices cannot do, and real ones can."""

on_separate = pytest.mark.on(*SEPARATE)
on_accelerators = pytest.mark.on(*ACCELERATORS)
not_on_sim = pytest.mark.on(*NO_SIM)
not_repeated = pytest.mark.on("cpu", *SEPARATE)
"""For what a Trainer, or an id, cannot say of one GPU that is there K times."""

kinds: tuple[str, ...] = ("cpu", "sim")
"""Those of this process."""


def accelerator_count() -> int:
    """How many devices the accelerator of this process has."""
    return SIM_DEVICES if "sim" in kinds else torch.cuda.device_count()


def choose(on: str | None, markers: str) -> None:
    """Decides on the kinds of this process, as its command line asks.

    Args:
        on: `--on`, if it was given.
        markers: `-m`; where it asks for "multigpu", GPUs are meant.

    Raises:
        pytest.UsageError: there is no GPU to test on.
    """
    global kinds
    asks_for_gpus = re.search(r"(?<!not )\bmultigpu\b", markers)
    if on == "sim" or (on is None and not asks_for_gpus):
        kinds = ("cpu", "sim") if sim_devices.IS_SUPPORTED else ("cpu",)
        return
    if torch.cuda.device_count() == 0:
        raise pytest.UsageError(
            f"--on cuda, -m multigpu: expected a GPU, but torch {torch.__version__} finds none. "
            "Leave the option out to test on the CPU and on simulated devices."
        )
    kinds = ("cpu", "cuda", "multigpu")


def type_of(kind: str) -> str:
    """What torch, and `Trainer(accelerator=...)`, call devices of a kind."""
    return "cuda" if kind == "multigpu" else kind


def devices(kind: str, k: int) -> list[torch.device]:
    """The devices of K replicas; the test is skipped where there are fewer GPUs than it needs."""
    if kind == "cpu":
        return [torch.device("cpu")] * k
    if kind == "multigpu" and k > torch.cuda.device_count():
        pytest.skip(f"needs {k} GPUs, found {torch.cuda.device_count()}")
    return [torch.device(type_of(kind), 0 if kind == "cuda" else i) for i in range(k)]


def as_parameters(wanted: Sequence[str] = ALL) -> list[Any]:
    """Those of the wanted kinds that this process has; the others are tested by another one."""
    marks = {"multigpu": [pytest.mark.multigpu]}
    return [pytest.param(k, marks=marks.get(k, [])) for k in kinds if k in wanted]


def header() -> str:
    """What is tested, and what is not though it could be."""
    gpus = torch.cuda.device_count() if "sim" in kinds else 0
    return f"devices: {', '.join(kinds)}" + f" (not on {gpus} GPUs: `--on cuda`)" * bool(gpus)
