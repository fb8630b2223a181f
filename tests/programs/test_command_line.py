"""`python -m lightning_dp` as a user types it."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from program_runs import command_line, read_json

from lightning_dp.app.devices import cpu_replicas
from lightning_dp.app.run import INTERRUPTED


@pytest.mark.slow
def test_command_line_runs_the_default_job(tmp_path: Path) -> None:
    printed = command_line("debug=fdr", "trainer.accelerator=cpu", cwd=tmp_path)
    (folder,) = (tmp_path / "logs" / "debug" / "runs").iterdir()
    assert read_json(folder / "metrics.json")["devices"] == [
        f"cpu:{k}" for k in range(cpu_replicas())
    ]
    assert (folder / ".hydra" / "overrides.yaml").is_file()
    assert folder.name in printed


@pytest.mark.slow
def test_default_training_learns_the_digits(tmp_path: Path) -> None:
    printed = command_line("trainer.accelerator=cpu", cwd=tmp_path)
    (folder,) = (tmp_path / "logs" / "train" / "runs").iterdir()
    assert read_json(folder / "metrics.json")["test/acc"] >= 0.99
    assert re.search(r"^run folder: .*$", printed, re.MULTILINE), printed
    assert "Tip" not in printed
    assert "Warning" not in printed


@pytest.mark.slow
def test_the_default_training_is_that_of_one_device(tmp_path: Path) -> None:
    def tested(devices: int) -> dict[str, float]:
        folder = tmp_path / str(devices)
        options = (f"trainer.devices={devices}", "trainer.max_epochs=3")
        command_line("trainer.accelerator=cpu", f"hydra.run.dir={folder}", *options, cwd=tmp_path)
        metrics = read_json(folder / "metrics.json")
        return {name: metrics[name] for name in ("test/acc", "test/loss")}

    assert tested(3) == pytest.approx(tested(1), rel=1e-3)


@pytest.mark.slow
def test_multirun_runs_the_strategies_one_after_another(tmp_path: Path) -> None:
    strategies = "strategy=dp_custom,ddp,single,ddp"
    options = ("trainer.accelerator=cpu", "trainer.devices=2", "trainer.max_epochs=1")
    command_line("-m", strategies, *options, cwd=tmp_path)
    (sweep,) = (tmp_path / "logs" / "train" / "multiruns").iterdir()
    folders = [sweep / str(job) for job in range(4)]
    metrics = [read_json(folder / "metrics.json") for folder in folders]
    assert [len(found["devices"]) for found in metrics] == [2, 2, 1, 2]
    assert metrics[0]["samples_per_device"] == [720, 720]
    assert not list((tmp_path / "logs" / "train").glob("runs/*")), "a child ran on its own"
    assert [(folder / "train_ddp_process_1.log").is_file() for folder in folders] == [
        False,
        True,
        False,
        True,
    ]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals are sent differently there")
def test_ctrl_c_ends_at_once_and_leaves_a_checkpoint(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lightning_dp", "trainer.accelerator=cpu"]
    endless = ["trainer.max_epochs=100000", "callbacks.early_stopping.patience=100000"]
    process = subprocess.Popen(
        [*command, *endless], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        deadline = time.monotonic() + 300
        while not list(tmp_path.glob("logs/train/runs/*/checkpoints/last.ckpt")):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        printed = process.communicate(timeout=60)[0].decode()
    finally:
        process.kill()
        process.wait()
    (folder,) = (tmp_path / "logs" / "train" / "runs").iterdir()
    assert process.returncode == INTERRUPTED, printed
    assert f"Interrupted. Run folder: {folder}" in printed
    torch.load(folder / "checkpoints" / "interrupted.ckpt", weights_only=True)
