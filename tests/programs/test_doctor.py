"""The doctor: every law holds on sound devices, and fails where what it proves is broken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import device_kinds
from torch import Tensor

from lightning_dp import DataParallel, __version__, doctor
from lightning_dp.doctor import laws, report
from lightning_dp.parallel import step
from lightning_dp.parallel.engine import Engine

LAWS = dict(laws.LAWS)
EASY = {"one float64 step": laws.LAWS["one float64 step"]}


def run(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The doctor's exit status and what it prints, on two replicas on the CPU."""
    status = doctor.main(["--devices", "cpu,cpu", *arguments])
    return status, capsys.readouterr().out


# --- laws -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", laws.LAWS)
def test_every_law_of_the_doctor_holds(name: str, on: str) -> None:
    if on == "cpu" or name != "out of memory":  # which has its own test, below
        assert laws.LAWS[name](device_kinds.devices(on, 3))


@pytest.mark.on("sim")  # GPUs cannot be given a memory for a test.
def test_a_step_that_runs_out_of_memory_is_done_again(room: Callable[[int, int], None]) -> None:
    room(2, 2**24)
    devices = [torch.device("sim", i) for i in range(3)]
    assert laws.out_of_memory(devices) == "the step was done again"


def off_by_one(scatter: Any) -> Any:
    def wrong(*given: Any) -> list[Tensor]:
        message, *others = scatter(*given)
        message = message.clone()
        last = message.view(-1)[5]
        message.view(-1)[5] = ~last if message.dtype == torch.bool else last + 1
        return [message, *others]

    return wrong


def off_gradients(backward: Any) -> Any:
    def wrong(engine: Any, *given: Any) -> None:
        backward(engine, *given)
        for parameter in engine.module.parameters():
            if parameter.grad is not None:
                parameter.grad *= 1 + 1e-4  # more than rounding, in float32 too

    return wrong


def leaves_gradients(run: Any) -> Any:
    def wrong(engine: Any, *given: Any) -> Any:
        try:
            return run(engine, *given)
        except torch.OutOfMemoryError:
            for parameter in engine.module.parameters():
                parameter.grad = torch.ones_like(parameter)
            raise

    return wrong


def equal_weights(_: Any) -> Any:
    """A mean of the shards' means, as nn.DataParallel has it."""
    return lambda sizes, *_: [1 / len(sizes)] * len(sizes)


BROKEN: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "copies are exact": (laws, "scatter", off_by_one),
    "one float64 step": (step, "loss_weights", equal_weights),
    "ten float32 steps": (Engine, "backward", off_gradients),
    "uneven batches": (step, "loss_weights", equal_weights),
    "forward mode": (DataParallel, "forward", lambda own: lambda net, x: own(net, x).roll(1, 0)),
    "out of memory": (Engine, "run", leaves_gradients),
}


@pytest.mark.parametrize("name", LAWS)
def test_a_law_of_the_doctor_fails_where_what_it_proves_is_broken(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(laws, "LAWS", {name: LAWS[name]})
    owner, attribute, wrong = BROKEN[name]
    monkeypatch.setattr(owner, attribute, wrong(getattr(owner, attribute)))
    status, printed = run(capsys=capsys)
    (line,) = [line for line in printed.splitlines() if line.startswith(f"  {name} ")]
    assert status == 1 and " FAILS " in line, printed
    assert "expected" in line or "differ" in line or "not close" in line or "not equal" in line
    assert "NOT HEALTHY: 0 of 1 laws hold" in printed and "ms per step" not in printed


# --- the report -----------------------------------------------------------------------------------


def test_a_sound_machine_is_healthy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(laws, "LAWS", EASY)
    monkeypatch.setattr(report, "STEPS", 1)
    monkeypatch.setattr(report, "ROUNDS", 2)
    status, printed = run(capsys=capsys)
    assert status == 0 and "one float64 step       holds    (7, 6)" in printed
    assert printed.endswith("Healthy: 1 of 1 laws hold on cpu:0, cpu:1.\n")
    assert "replicas that share the CPU" in printed and "python " in printed
    for way in ("one device", "2 devices"):
        (line,) = [line for line in printed.splitlines() if line.startswith(way)]
        assert "ms per step" in line and "ratio" in line


@pytest.mark.parametrize(
    ("text", "found", "expected"),
    [
        (None, ["cpu"], ["cpu", "cpu"]),
        ("3", ["cpu"], ["cpu"] * 3),
        (None, ["cuda:0"], ["cuda:0"] * 2),
        ("3", ["cuda:0", "cuda:1"], ["cuda:0", "cuda:1", "cuda:0"]),
        ("cpu, cpu", ["cuda:0"], ["cpu", "cpu"]),
    ],
)
def test_devices_are_all_or_as_many_as_asked_or_named(
    text: str | None, found: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report.machine, "all_devices", lambda: [torch.device(n) for n in found])
    assert report.devices_named(text) == [torch.device(name) for name in expected]


def test_env_tells_what_matters_and_no_secret(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    variables = {"OMP_NUM_THREADS": "3", "WANDB_API_KEY": "a-secret", "SLURM_JOB_USER": "somebody"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    wanted = {"python", "torch", "lightning", "hydra-core", "lightning-dp", "GIL", "system", "cpu"}
    assert doctor.env([]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in (*wanted, "OMP_NUM_THREADS", __version__))
    assert not any(word in text for word in ("secret", "somebody", "WANDB", str(Path.home())))
