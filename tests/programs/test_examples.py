"""Every file in examples/ runs as a script, and as `python -m lightning_dp experiment=NAME`."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module

from lightning_dp.app.run import as_program
from lightning_dp.app.train import train

ROOT = Path(__file__).resolve().parents[2]
NAMES = sorted(
    file.stem for file in (ROOT / "examples").glob("*.py") if not file.stem.startswith("_")
)
PLAIN = {"migrate"}  # plain PyTorch, without a LightningModule: scripts and no experiments
QUICK = {"stdlib_lm": ["--files=6"], "denoise": ["--pages=64"]}
EXPERIMENTS = [name for name in NAMES if name not in PLAIN]


def test_every_example_is_an_experiment_and_the_reverse() -> None:
    experiments = {file.stem for file in (ROOT / "conf" / "experiment").glob("*.yaml")}
    assert experiments == set(EXPERIMENTS)


@pytest.mark.parametrize("name", NAMES)
def test_only_plain_scripts_do_without_a_lightning_module(name: str) -> None:
    source = (ROOT / "examples" / f"{name}.py").read_text()
    assert ("LightningModule" in source) == (name not in PLAIN)


RUN_ELSEWHERE = set(NAMES) - {"digits"}
"""Scripts that have tests of their own."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in RUN_ELSEWHERE else name
        for name in NAMES
    ],
)
def test_example_runs_as_a_script(name: str, tmp_path: Path) -> None:
    script = ROOT / "examples" / f"{name}.py"
    done = subprocess.run(
        [
            sys.executable,
            "-Wdefault",
            str(script),
            "--accelerator=cpu",
            "--devices=2",
            "--epochs=1",
            *QUICK.get(name, []),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test/" in done.stdout
    # No advertisement, and no warning that is about others' code.
    noise = "Tip|Warning|deprecated|litlogger|workers|available: False"
    assert not re.search(noise, done.stdout + done.stderr)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_example_runs_as_an_experiment(name: str, tmp_path: Path) -> None:
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
    result = as_program(train)(cfg)
    assert any(metric.startswith("test/") for metric in result.metrics)
    assert (tmp_path / "metrics.json").is_file()
