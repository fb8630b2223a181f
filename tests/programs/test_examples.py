"""Every file in examples/ trains as a script and as an experiment, with one device's numbers."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hydra import compose, initialize_config_module
from support.programs import ROOT

from lightning_dp.app.jobs import train
from lightning_dp.app.run import as_program
from lightning_dp.examples import contrastive, digits, gan, language_model, migrate, tutorial

MAINS: dict[str, Any] = {
    "contrastive": contrastive.main,
    "digits": digits.main,
    "gan": gan.main,
    "language_model": language_model.main,
}
OPTIONS = {"language_model": ["--files=6"]}


def test_there_is_an_experiment_for_every_lightning_module() -> None:
    files = {f.stem for f in (ROOT / "examples").glob("*.py") if "LightningModule" in f.read_text()}
    assert {file.stem for file in (ROOT / "conf" / "experiment").glob("*.yaml")} == files


def test_no_example_imports_the_app() -> None:
    for file in (ROOT / "examples").glob("*.py"):
        assert "lightning_dp.app" not in file.read_text(), file


@pytest.mark.parametrize("name", MAINS)
def test_an_example_prints_on_several_devices_what_it_prints_on_one(name: str) -> None:
    options = ["--epochs=1", *OPTIONS.get(name, [])]
    one, three = (
        numbers(in_here(MAINS[name], f"--devices={devices}", *options)) for devices in (1, 3)
    )
    assert len(one) >= 2 and three == pytest.approx(one, rel=2e-3)


def in_here(main: Callable[[], None], *arguments: str) -> str:
    """What a script prints, run in this process: its imports take longer than its work."""
    printed = io.StringIO()
    with mock.patch.object(sys, "argv", ["script", *arguments]), redirect_stdout(printed):
        main()
    return printed.getvalue()


def numbers(printed: str) -> dict[str, float]:
    """The values that are printed after `train/...` and `test/...`."""
    pairs = re.findall(r"((?:train|test)/\w+)\W+(\d+\.\d+)\s*│?\s*$", printed, re.MULTILINE)
    return {name: float(value) for name, value in pairs}


@pytest.mark.parametrize("name", [*MAINS, "tutorial"])
def test_an_example_runs_as_an_experiment(name: str, tmp_path: Path) -> None:
    overrides = [
        f"experiment={name}",
        "trainer.accelerator=cpu",
        "trainer.devices=2",
        "trainer.fast_dev_run=true",
        f"paths.output_dir={tmp_path}",
        "paths.work_dir=.",
    ]
    with initialize_config_module("lightning_dp.conf", version_base="1.3"):
        cfg = compose("train", overrides=overrides)
    assert any(metric.startswith("test/") for metric in as_program(train)(cfg))


@pytest.mark.parametrize(
    ("options", "full", "last"),
    [
        (("--devices=2", "--split=chunk"), [15, 15], [5, 5]),
        (("--devices=3", "--split=chunk"), [10, 10, 10], [4, 4, 2]),
        (("--devices=8", "--split=chunk"), [4, 4, 4, 4, 4, 4, 4, 2], [2, 2, 2, 2, 2]),
        (("--devices=8",), [4, 4, 4, 4, 4, 4, 3, 3], [2, 2, 1, 1, 1, 1, 1, 1]),
    ],
    ids=str,
)
def test_the_tutorial_shows_what_each_device_sees(
    options: tuple[str, ...], full: list[int], last: list[int]
) -> None:
    printed = in_here(tutorial.main, *options)
    batches = [re.findall(r"input \((\d+), 5\)", b) for b in printed.split("batch (")[1:]]
    assert [list(map(int, batch)) for batch in batches] == [full, full, full, last]
    assert printed.count("outside: output (30, 2) on cpu") == 3


def test_an_old_script_loads_old_keys_and_saves_clean_ones(tmp_path: Path) -> None:
    printed = in_here(migrate.main, "--epochs=3", f"--folder={tmp_path}")
    old, new = (torch.load(tmp_path / f"{name}.pt", map_location="cpu") for name in ("old", "new"))
    assert all(key.startswith("module.") for key in old)
    assert [f"module.{key}" for key in new] == list(old)
    lines = [line for line in printed.splitlines() if line.startswith("test/acc")]
    accuracies = [float(line.split()[1]) for line in lines]
    assert len(accuracies) == 2 and accuracies[0] == accuracies[1] > 0.8
