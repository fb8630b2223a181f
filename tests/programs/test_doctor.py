"""The doctor: every law holds on sound devices, and fails where what it proves is broken."""

from __future__ import annotations

import json
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

CPU = [torch.device("cpu")] * 2
LAWS = dict(laws.LAWS)
EASY = {"one float64 step": laws.LAWS["one float64 step"]}


def run(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The doctor's exit status and what it prints, on two replicas on the CPU."""
    status = doctor.main(["--devices", "cpu,cpu", *arguments])
    return status, capsys.readouterr().out


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """One law and few timed steps: what is tested is what becomes of it."""
    monkeypatch.setattr(laws, "LAWS", EASY)
    monkeypatch.setattr(report, "STEPS", 1)
    monkeypatch.setattr(report, "ROUNDS", 2)


# --- laws -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", laws.LAWS)
def test_every_law_holds_on_the_cpu(name: str) -> None:
    assert laws.LAWS[name]([torch.device("cpu")] * 3)


@device_kinds.on_accelerators
@pytest.mark.parametrize("name", sorted(laws.LAWS.keys() - {"out of memory"}))
def test_every_law_holds_on_separate_devices(name: str, on: str) -> None:
    devices = device_kinds.devices(on, 4)
    assert laws.LAWS[name](devices)


def test_a_step_that_runs_out_of_memory_is_done_again(room: Callable[[int, int], None]) -> None:
    room(2, 2**24)
    devices = [torch.device("sim", i) for i in range(3)]
    assert laws.out_of_memory(devices) == "the step was done again"


def changed(result: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A tensor, or the first tensor of a list, with a change."""
    if isinstance(result, Tensor):
        return change(result)
    return [change(result[0]), *result[1:]]


def off_by_one(message: Tensor) -> Tensor:
    wrong = message.clone()
    wrong.view(-1)[5] = ~wrong.view(-1)[5] if wrong.dtype == torch.bool else wrong.view(-1)[5] + 1
    return wrong


def copies_off_by_one(patch: pytest.MonkeyPatch) -> None:
    scatter = laws.scatter
    patch.setattr(laws, "scatter", lambda *given: changed(scatter(*given), off_by_one))


def equal_loss_weights(patch: pytest.MonkeyPatch) -> None:
    """A mean of the shards' means, as nn.DataParallel has it."""
    patch.setattr(step, "loss_weights", lambda sizes, *_: [1 / len(sizes)] * len(sizes))


def gradients_off(patch: pytest.MonkeyPatch) -> None:
    """What a gradient is off by is more than rounding, in float32 too."""
    backward = Engine.backward

    def wrong(self: Any, *given: Any) -> None:
        backward(self, *given)
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad *= 1 + 1e-4

    patch.setattr(Engine, "backward", wrong)


def outputs_in_another_order(patch: pytest.MonkeyPatch) -> None:
    forward = DataParallel.forward
    patch.setattr(DataParallel, "forward", lambda self, x: forward(self, x).roll(1, 0))


def failed_step_leaves_gradients(patch: pytest.MonkeyPatch) -> None:
    run = Engine.run

    def leaves(self: Any, *given: Any) -> Any:
        try:
            return run(self, *given)
        except torch.OutOfMemoryError:
            for parameter in self.module.parameters():
                parameter.grad = torch.ones_like(parameter)
            raise

    patch.setattr(Engine, "run", leaves)


def prefixes_are_saved(patch: pytest.MonkeyPatch) -> None:
    def state_dict(self: Any) -> Any:
        return {f"module.{key}": value for key, value in self.module.state_dict().items()}

    patch.setattr(DataParallel, "state_dict", state_dict)


BROKEN = [
    ("copies are exact", copies_off_by_one),
    ("one float64 step", equal_loss_weights),
    ("ten float32 steps", gradients_off),
    ("one bf16 step", equal_loss_weights),
    ("uneven batches", equal_loss_weights),
    ("forward mode", outputs_in_another_order),
    ("out of memory", failed_step_leaves_gradients),
    ("checkpoint round trip", prefixes_are_saved),
]


@pytest.mark.parametrize(
    "name, broken", BROKEN, ids=lambda value: getattr(value, "__name__", value)
)
def test_a_law_fails_where_what_it_proves_is_broken(
    name: str,
    broken: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(laws, "LAWS", {name: LAWS[name]})
    broken(monkeypatch)
    status, printed = run(capsys=capsys)
    (line,) = [line for line in printed.splitlines() if line.startswith(f"  {name} ")]
    assert status == 1 and " FAILS " in line, printed
    assert "expected" in line or "differ" in line or "not close" in line or "not equal" in line
    assert "NOT HEALTHY: 0 of 1 laws hold" in printed and "ms per step" not in printed


def test_every_law_is_broken_above() -> None:
    assert {name for name, _ in BROKEN} == set(laws.LAWS)


# --- the report -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("quick")
def test_a_sound_machine_is_healthy(capsys: pytest.CaptureFixture[str]) -> None:
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
        (None, ["cuda:0", "cuda:1"], ["cuda:0", "cuda:1"]),
        ("3", ["cuda:0", "cuda:1"], ["cuda:0", "cuda:1", "cuda:0"]),
        ("cpu, cpu", ["cuda:0"], ["cpu", "cpu"]),
    ],
)
def test_devices_are_all_or_as_many_as_asked_or_named(
    text: str | None, found: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report.machine, "all_devices", lambda: [torch.device(n) for n in found])
    assert report.devices_named(text) == [torch.device(name) for name in expected]


# --- the environment ------------------------------------------------------------------------------


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


@pytest.mark.usefixtures("quick")
def test_a_file_is_written_on_demand_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(capsys=capsys)[0] == 0 and not list(tmp_path.iterdir())
    assert run("--json", "doctor.json", capsys=capsys)[0] == 0
    written = json.loads((tmp_path / "doctor.json").read_text())
    assert written["healthy"] and written["laws"]["one float64 step"]["verdict"] == "holds"
    assert written["environment"]["lightning-dp"] == __version__ and written["timing"]
