"""Trainings and evaluations: what a run leaves, how it ends, and how it goes on."""

from __future__ import annotations

import csv
import logging
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf
from support.oracle import assert_equal_trees
from support.programs import read_json
from torch.utils.data import DataLoader

from lightning_dp.app.jobs import evaluate, train, train_main
from lightning_dp.app.run import INTERRUPTED, TERMINATED, OptionError, as_program
from lightning_dp.examples.digits import DigitsCRNN, DigitsDataModule

SMALL = (
    *("trainer.accelerator=cpu", "trainer.devices=2", "trainer.max_epochs=3"),
    *("trainer.limit_train_batches=3", "trainer.limit_val_batches=2"),
    *("trainer.limit_test_batches=1", "model.width=2", "data.batch_size=16"),
    *("strategy.executor=inorder", "extras.check_first_step=false"),
    "+trainer.num_sanity_val_steps=0",
    *("+trainer.enable_progress_bar=false", "+trainer.enable_model_summary=false"),
)
BARE = ("~logger", "~callbacks.data_parallel_monitor")

pytestmark = [
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended be"),
    pytest.mark.filterwarnings("ignore:the model's own"),
]


def of_class(kind: type) -> str:
    return f"model._target_={__name__}.{kind.__name__}"


def configured(folder: Path, *overrides: str, name: str = "train") -> DictConfig:
    """A small job whose run folder is `folder`."""
    paths = (f"paths.output_dir={folder}", "paths.work_dir=.")
    small = SMALL if name == "train" else ("trainer.accelerator=cpu", "trainer.devices=2")
    with initialize_config_module("lightning_dp.conf", version_base="1.3"):
        return compose(name, overrides=[*paths, *small, *overrides])


def state(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(path, weights_only=True)
    return loaded


@contextmanager
def logged(folder: Path) -> Iterator[Path]:
    """A log file as Hydra opens it."""
    folder.mkdir(exist_ok=True)
    handler, root = logging.FileHandler(folder / "train.log"), logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        yield folder / "train.log"
    finally:
        root.setLevel(level)
        root.removeHandler(handler)
        handler.close()


class Recorded(DigitsCRNN):
    """Its first epoch is its best one; it warns in every step and keeps the learning rates."""

    rates: list[float] = []  # noqa: RUF012  # of all trainings

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        warnings.warn("the model's own", UserWarning, stacklevel=1)
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", float(self.current_epoch))


class Ends(DigitsCRNN):
    """Ends once, in its second epoch, by an error or a signal."""

    by: type[BaseException] | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        error = type(self).by
        if error is not None and (self.current_epoch, batch_idx) == (1, 1):
            type(self).by = None
            if error is not SystemExit:
                raise error("a plug was pulled")
            os.kill(os.getpid(), signal.SIGTERM)
        return super().training_step(batch, batch_idx)


class Ordered(DigitsDataModule):
    """Its epochs are alike: Lightning does not keep the order of a shuffled one."""

    def train_dataloader(self) -> Any:
        return DataLoader(super().train_dataloader().dataset, self.batch_size)


# On one device: its batch norm sees whole batches, whatever shards the first ones are cut into.
ALIKE = (f"data._target_={__name__}.Ordered", "trainer.devices=1", *BARE, "test=false")


# --- what a run leaves ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A training with everything: its folder, report, log, what it printed, and its handlers."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    cfg = configured(folder, of_class(Recorded), "tags=['${oc.env:DP_SECRET}']")
    printed: list[str] = []
    loggers = [logging.getLogger(n) for n in (None, "lightning.pytorch", "py.warnings")]
    with (
        logged(folder) as log,
        mock.patch.dict(os.environ, DP_SECRET="a-key-of-mine"),
        mock.patch("builtins.print", lambda *texts: printed.append(" ".join(map(str, texts)))),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("default")
        before = [lg.handlers[:] for lg in loggers[:2]], warnings.showwarning
        metrics = as_program(train)(cfg)
        after = [lg.handlers[:] for lg in loggers[:2]], warnings.showwarning
    assert before == after, "the process is as it was"
    return folder, metrics, log.read_text(), "\n".join(printed)


def test_a_run_keeps_its_best_and_its_last_checkpoint(done: Any) -> None:
    folder = done[0] / "checkpoints"
    assert {path.name for path in folder.iterdir()} == {"epoch_000.ckpt", "last.ckpt"}
    best, last = state(folder / "epoch_000.ckpt"), state(folder / "last.ckpt")
    assert (best["epoch"], best["global_step"]) == (0, 3)
    assert (last["epoch"], last["global_step"]) == (2, 9)


def test_a_run_leaves_metrics_of_each_epoch_and_device(done: Any) -> None:
    folder, metrics, _, printed = done
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows if row["val/loss"]] == ["0", "1", "2"]
    assert {row["dp/cpu_1/samples"] for row in rows} == {"8.0", ""}
    found = read_json(folder / "metrics.json")
    assert found["test/acc"] == metrics["test/acc"]
    assert found["devices"] == ["cpu:0", "cpu:1"] and found["samples_per_device"] == [72, 72]
    for name in ("busy_seconds_per_device", "waiting_seconds_per_device"):
        assert len(found[name]) == 2 and min(found[name]) > 0
    assert (folder / "devices.png").read_bytes().startswith(b"\x89PNG")
    assert f"test/acc {found['test/acc']:.4f}" in printed and f"run folder: {folder}" in printed
    assert f"devices: {folder / 'devices.png'}" in printed


def test_the_log_of_a_run_has_warnings_and_versions(done: Any) -> None:
    log = done[2]
    assert f"torch {torch.__version__}" in log
    assert log.count("UserWarning: the model's own") == 1


def test_secrets_of_the_environment_are_written_nowhere(done: Any) -> None:
    folder, _, log, printed = done
    assert "${oc.env:DP_SECRET}" in (folder / "config.yaml").read_text()
    texts = [path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file()]
    assert not any("a-key-of-mine" in text for text in [*texts, log, printed])


def test_a_run_is_evaluated_in_its_best_state(done: Any, tmp_path: Path) -> None:
    folder, trained, _, _ = done
    with mock.patch.dict(os.environ, DP_SECRET="x"):
        few = "trainer.limit_test_batches=1"
        tested = as_program(evaluate)(configured(tmp_path, f"run={folder}", few, name="eval"))
    assert tested["test/loss"] == trained["test/loss"]
    written = OmegaConf.load(tmp_path / "config.yaml")
    assert written.ckpt_path == str(folder / "checkpoints" / "epoch_000.ckpt")
    assert (written.model.width, written.data.batch_size) == (2, 16)


def test_a_run_resumed_after_its_last_epoch_still_learns(done: Any, tmp_path: Path) -> None:
    """After the last epoch of the default schedule, too."""
    rates, before = Recorded.rates, len(Recorded.rates)
    path = f"ckpt_path={done[0] / 'checkpoints' / 'last.ckpt'}"
    options = (of_class(Recorded), path, "trainer.max_epochs=5", "test=false", *BARE)
    as_program(train)(configured(tmp_path, *options))
    assert len(rates) == before + 6 and min(rates[before:]) >= 0.0002
    assert state(tmp_path / "checkpoints" / "last.ckpt")["global_step"] == 15


# --- how it ends before its time ------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The end of a training that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    as_program(train)(configured(folder, *ALIKE))
    return state(folder / "checkpoints" / "last.ckpt")


@pytest.mark.skipif(sys.platform == "win32", reason="signals are sent differently there")
@pytest.mark.parametrize(
    ("error", "said", "status"),
    [
        (RuntimeError, "Failed", None),
        (SystemExit, "Terminated", TERMINATED),
        pytest.param(KeyboardInterrupt, "Interrupted", INTERRUPTED, marks=pytest.mark.slow),
    ],
)
def test_a_training_that_ends_early_can_be_resumed_as_if_it_had_not(
    error: type[BaseException],
    said: str,
    status: int | None,
    whole: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Ends, "by", error)
    own = pytest.raises(SystemExit if status else error)
    with logged(tmp_path / "run") as log, own as stop:
        as_program(train)(configured(tmp_path / "run", of_class(Ends), *ALIKE))
    assert getattr(stop.value, "code", None) == status
    assert status or ("Traceback" in log.read_text() and "a plug was pulled" in log.read_text())
    path = tmp_path / "run" / "checkpoints" / "last.ckpt"
    lines = f"{said}. Run folder: {tmp_path / 'run'}\nTo go on: ckpt_path={path}\n"
    assert lines in capsys.readouterr().err

    as_program(train)(configured(tmp_path / "on", of_class(Ends), *ALIKE, f"ckpt_path={path}"))
    end = state(tmp_path / "on" / "checkpoints" / "last.ckpt")
    assert (end["epoch"], end["global_step"]) == (whole["epoch"], whole["global_step"]) == (2, 9)
    assert_equal_trees(end["state_dict"], whole["state_dict"], "resumed", atol=1e-6, rtol=0)


def test_an_unusable_option_leaves_its_traceback_in_the_log(tmp_path: Path, capsys: Any) -> None:
    with (
        logged(tmp_path) as log,
        pytest.raises(OptionError, match=r"^error: ckpt_path: "),
    ):
        as_program(train)(configured(tmp_path, "ckpt_path=no.ckpt"))
    assert "Traceback" in log.read_text() and "Run folder" not in capsys.readouterr().err


# --- sweeps ---------------------------------------------------------------------------------------


def test_a_sweep_goes_on_after_a_job_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    options = [*SMALL, *BARE, "trainer.max_epochs=1", "strategy.split=even,nonsense"]
    monkeypatch.setattr(sys, "argv", ["lightning-dp", "-m", *options])
    with pytest.raises(SystemExit) as stop:
        train_main()
    assert stop.value.code == 1
    (folder,) = (tmp_path / "logs" / "train" / "multiruns").iterdir()
    assert read_json(folder / "0" / "metrics.json")["test/acc"] > 0
    assert "`Trainer.fit` stopped" in (folder / "0" / "train.log").read_text()
    said = capsys.readouterr()
    assert "split: expected one of" in said.err and "Traceback" not in said.err
