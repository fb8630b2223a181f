"""An option of an example that cannot be used is one line, as a script and as an experiment."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_module

from lightning_dp.app.run import as_program
from lightning_dp.app.train import train
from lightning_dp.examples import contrastive, denoise, digits, gan, migrate, stdlib_lm, tutorial

SCRIPTS = {
    "contrastive": contrastive,
    "denoise": denoise,
    "digits": digits,
    "gan": gan,
    "migrate": migrate,
    "stdlib_lm": stdlib_lm,
    "tutorial": tutorial,
}


def error_of(main: Any, capsys: pytest.CaptureFixture[str]) -> str:
    """What a program that ends with an error prints as such: one line."""
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code in (1, 2)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    return line


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--devices=0", "argument --devices: expected a whole number from 1 on, got '0'"),
        ("--epochs=two", "argument --epochs: expected a whole number from 1 on, got 'two'"),
        ("--accelerator=tpu", "argument --accelerator: invalid choice: 'tpu'"),
    ],
)
def test_a_script_says_in_one_line_what_it_expects(
    name: str,
    arguments: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments.split()])
    assert message in error_of(SCRIPTS[name].main, capsys)


@pytest.mark.parametrize(
    ("name", "argument", "message"),
    [
        ("stdlib_lm", "--split=fair", "argument --split: invalid choice: 'fair'"),
        ("denoise", "--split=fair", "argument --split: invalid choice: 'fair'"),
        ("tutorial", "--split=fair", "argument --split: invalid choice: 'fair'"),
        ("tutorial", "--device-ids=7,x", "--device-ids: expected a whole number from 0 on"),
    ],
)
def test_so_it_does_for_options_of_its_own(
    name: str,
    argument: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", [f"{name}.py", argument])
    assert message in error_of(SCRIPTS[name].main, capsys)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_script_without_a_gpu_says_what_else_there_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["denoise.py", "--accelerator=gpu"])
    assert "got none (--devices=4). Use --accelerator=cpu" in error_of(denoise.main, capsys)


@pytest.mark.parametrize(
    ("name", "override", "message"),
    [
        ("stdlib_lm", "data.batch_size=0", "batch_size: expected a whole number of at least 1"),
        ("stdlib_lm", "data.max_length=1.5", "data.max_length: expected a whole number for"),
        ("stdlib_lm", "data.files=2", "files: expected a whole number of at least 3, got 2"),
        ("stdlib_lm", "model.layers=0", "layers: expected a whole number of at least 1, got 0"),
        ("digits", "data.batch_size=0", "batch_size: expected a whole number of at least 1, got 0"),
        ("digits", "model.width=0", "width: expected a whole number of at least 1, got 0"),
        ("contrastive", "data.labelled=0", "labelled: expected a whole number of at least 1"),
        ("gan", "model.latent=0", "latent: expected a whole number of at least 1, got 0"),
        ("tutorial", "data.rows=0", "rows: expected a whole number of at least 1, got 0"),
        ("denoise", "data.pages=31", "pages: expected a whole number of at least 32, got 31"),
        ("denoise", "data.noise=-1", "noise: expected a number of at least 0.0, got -1"),
        ("denoise", "model.levels=5 data.side=1", "height: expected a multiple of 16, as levels=5"),
    ],
)
def test_an_experiment_says_in_one_line_what_it_expects(
    name: str, override: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [
        f"experiment={name}",
        "trainer.accelerator=cpu",
        "trainer.devices=2",
        "trainer.fast_dev_run=true",
        f"paths.output_dir={tmp_path}",
        "paths.work_dir=.",
        *override.split(),
    ]
    with initialize_config_module("lightning_dp.conf", version_base="1.3"):
        cfg = compose("train", overrides=overrides)
    assert message in error_of(lambda: as_program(train)(cfg), capsys)
