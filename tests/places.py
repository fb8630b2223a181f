"""The kinds of devices that this process tests on, and what a test says about those it needs.

torch has one accelerator in a process, so simulated devices and GPUs are tested in two:
`python -m pytest` has "cpu" and "sim", and `python -m pytest --on cuda` has "cpu", "cuda" (one GPU,
K times) and "multigpu" (K GPUs).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import pytest
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
played = 0
"""How many GPUs are played by simulated devices, to try the tests of GPUs where there are none."""


def gpu_count() -> int:
    """How many GPUs there are, or are played."""
    return played or torch.cuda.device_count()


def accelerator_count() -> int:
    """How many devices the accelerator of this process has."""
    return SIM_DEVICES if "sim" in kinds else gpu_count()


def choose(on: str | None, markers: str, gpus_to_play: int = 0) -> None:
    """Decides on the kinds of this process, as its command line asks.

    Args:
        on: `--on`, if it was given.
        markers: `-m`; where it asks for "multigpu", GPUs are meant.
        gpus_to_play: how many simulated devices stand in for GPUs.

    Raises:
        pytest.UsageError: there is no GPU to test on.
    """
    global kinds, played
    asks_for_gpus = re.search(r"(?<!not )\bmultigpu\b", markers)
    played = gpus_to_play
    if on == "sim" or (on is None and not asks_for_gpus):
        kinds = ("cpu", "sim")
        return
    if gpu_count() == 0:
        raise pytest.UsageError(
            f"--on cuda, -m multigpu: expected a GPU, but torch {torch.__version__} finds none. "
            "Leave the option out to test on the CPU and on simulated devices."
        )
    kinds = ("cpu", "cuda", "multigpu")


def type_of(kind: str) -> str:
    """What torch, and `Trainer(accelerator=...)`, call devices of a kind."""
    if kind in ("cuda", "multigpu"):
        return "sim" if played else "cuda"
    return kind


def devices(kind: str, k: int) -> list[torch.device]:
    """The devices of K replicas; the test is skipped where there are fewer GPUs than it needs."""
    if kind == "cpu":
        return [torch.device("cpu")] * k
    if kind == "multigpu" and k > gpu_count():
        pytest.skip(f"needs {k} GPUs, found {gpu_count()}")
    return [torch.device(type_of(kind), 0 if kind == "cuda" else i) for i in range(k)]


def as_parameters(
    wanted: Sequence[str] = ALL, marks: Mapping[str, pytest.MarkDecorator] = MappingProxyType({})
) -> list[Any]:
    """Those of the wanted kinds that this process has; the others are tested by another one.

    Args:
        wanted: kinds.
        marks: what the test is marked with on some of them.
    """
    if played and "sim" not in wanted:  # what these cannot do
        wanted = [kind for kind in wanted if kind == "cpu"]
    found = [kind for kind in kinds if kind in wanted]
    own = {kind: [pytest.mark.multigpu] * (kind == "multigpu") for kind in found}
    return [pytest.param(k, marks=[*own[k], *([marks[k]] if k in marks else [])]) for k in found]


def header() -> str:
    """What is tested, and what is not though it could be."""
    said = f"devices: {', '.join(kinds)}"
    if "sim" in kinds and (found := gpu_count()):
        said += f" (GPUs found: {found}; `python -m pytest --on cuda` tests on them)"
    return said
