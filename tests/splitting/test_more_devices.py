"""One line, once, where one device was taken although several were possible."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from oracle import QUIET, Classifier, loader
from program_runs import ROOT

from lightning_dp import DataParallelStrategy
from lightning_dp.app.scripts import ScriptParser
from lightning_dp.hints import more_devices


@pytest.fixture(autouse=True)
def due(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """As in a fresh process, on a machine of 8 cores."""
    monkeypatch.setattr(more_devices, "is_due", True)
    monkeypatch.setattr(more_devices, "cores", lambda: 8)
    caplog.set_level(logging.INFO)


def hints(caplog: Any) -> list[str]:
    found = [r for r in caplog.records if "on one device" in r.getMessage()]
    assert all(r.levelno == logging.INFO for r in found)
    return [r.getMessage() for r in found]


def job(strategy: Any = "dp_custom", **options: Any) -> Trainer:
    own = {"strategy": strategy, "accelerator": "cpu", "max_steps": 1, **options}
    return Trainer(**{**QUIET, **own})


@pytest.mark.parametrize("strategy", ["dp_custom", "dp_custom_forward"])
@pytest.mark.parametrize("accelerator", ["cpu", "auto"])
def test_one_cpu_that_auto_has_taken_is_told_once(
    strategy: str, accelerator: str, caplog: Any
) -> None:
    if accelerator == "auto" and torch.accelerator.is_available():
        pytest.skip("auto takes the accelerator")
    for _ in range(2):
        job(strategy, accelerator=accelerator).fit(Classifier(), loader(), loader())
    (text,) = hints(caplog)
    assert text == (
        'dp_custom trains on one device, cpu, which is what devices="auto" means there. For 4 '
        'replicas write devices=4: Trainer(strategy="dp_custom", devices=4, ...).'
    )


def test_only_a_fit_tells(caplog: Any) -> None:
    trainer = job(limit_val_batches=1, limit_test_batches=1, limit_predict_batches=1)
    for run in (trainer.validate, trainer.test, trainer.predict):
        run(Classifier(), loader(), **({} if run == trainer.predict else {"verbose": False}))
    assert not hints(caplog)
    trainer.fit(Classifier(), loader(), loader())
    assert len(hints(caplog)) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"devices": 2},
        {"strategy": DataParallelStrategy(devices=["cpu"])},
        {"strategy": DataParallelStrategy(devices=["cpu", "cpu"])},
        {"strategy": "auto"},
    ],
    ids=["two", "one on purpose", "two of the strategy", "Lightning's strategy"],
)
def test_what_was_asked_for_is_not_told(options: dict[str, Any], caplog: Any) -> None:
    job(**options).fit(Classifier(), loader(), loader())
    assert not hints(caplog)


def test_a_single_core_has_no_more_to_give(monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setattr(more_devices, "cores", lambda: 1)
    job().fit(Classifier(), loader(), loader())
    assert not hints(caplog)


def test_an_accelerator_is_one_of_many_by_itself_in_interactive_sessions_alone(
    monkeypatch: Any, caplog: Any
) -> None:
    accelerator = SimpleNamespace(auto_device_count=lambda: 3)
    more_devices.hint_more_devices(accelerator, torch.device("cuda", 0))
    assert not hints(caplog)  # a script's "auto" takes all: somebody wanted one
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    one = SimpleNamespace(auto_device_count=lambda: 1)
    more_devices.hint_more_devices(one, torch.device("cuda", 0))
    assert not hints(caplog)
    more_devices.hint_more_devices(accelerator, torch.device("cuda", 0))
    (text,) = hints(caplog)
    assert "on one device, cuda:0. For 3 replicas write devices=3" in text


def test_scripts_are_told_the_number_of_devices(monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["script", "--devices", "1"])
    ScriptParser("A script.", devices=2, epochs=1).parse()
    job().fit(Classifier(), loader(), loader())
    assert not hints(caplog)


@pytest.mark.slow
@pytest.mark.parametrize("devices, is_told", [("1", False), ("auto", True)])
def test_the_program_knows_whether_one_device_was_asked_for(
    devices: str, is_told: bool, tmp_path: Path
) -> None:
    options = ["trainer.accelerator=cpu", f"trainer.devices={devices}", "trainer.max_epochs=1"]
    done = subprocess.run(
        [sys.executable, "-m", "lightning_dp", *options, "test=false", "callbacks=none"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    several_cores = more_devices.cores() > 1
    assert ("write devices=" in done.stderr + done.stdout) == (is_told and several_cores)
