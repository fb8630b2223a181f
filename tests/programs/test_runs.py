"""What a run leaves: the last state, a log, and a folder only if it has begun."""

import errno
import io
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hydra import compose, initialize_config_module
from lightning.pytorch.trainer.states import TrainerFn
from omegaconf import DictConfig, OmegaConf
from oracle import assert_equal_trees
from program_runs import ROOT, command_line, read_json
from torch import nn
from torch.utils.data import DataLoader

from lightning_dp.app.callbacks import InterruptedCheckpoint
from lightning_dp.app.evaluate import evaluate
from lightning_dp.app.quiet import quiet
from lightning_dp.app.run import as_program
from lightning_dp.app.train import train
from lightning_dp.examples.digits import DigitsCRNN, DigitsDataModule

HERE = __name__
SMALL = (
    "trainer.accelerator=cpu",
    "trainer.devices=2",
    "trainer.max_epochs=3",
    "trainer.limit_train_batches=3",
    "model.width=2",
    "data.batch_size=16",
    "logger=none",
    "strategy.executor=inorder",
    "trainer.limit_val_batches=2",
    "trainer.limit_test_batches=1",
    "+trainer.enable_model_summary=false",
    "+trainer.num_sanity_val_steps=0",
    "~callbacks.rich_progress_bar",
    "~callbacks.data_parallel_monitor",
)

Configure = Callable[..., DictConfig]


class Worse(DigitsCRNN):
    """Its first epoch is its best one."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", float(self.current_epoch))


WHERE = ("training", "validation", "validation step", "end")


class Fails(DigitsCRNN):
    """Fails once, in one of these places."""

    where = "training"
    error: type[BaseException] | None = RuntimeError

    def fail(self, where: str, at: bool) -> None:
        error = type(self).error
        if at and where == self.where and error is not None:
            type(self).error = None
            raise error("a plug was pulled")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.fail("training", self.current_epoch == 1 and batch_idx == 1)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.fail("validation step", self.current_epoch == 1 and batch_idx == 1)
        super().validation_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        self.fail("validation", self.current_epoch == 1)

    def on_train_epoch_end(self) -> None:
        self.fail("end", self.current_epoch == 1)


class Warns(DigitsCRNN):
    """Says twice in every step what nobody hears more than once."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for _ in range(2):
            warnings.warn("the model's own", UserWarning, stacklevel=1)


class WritesEpochs(DigitsCRNN):
    """Says in a file which epoch it is in."""

    def on_train_epoch_start(self) -> None:
        Path(os.environ["EPOCHS"]).write_text(str(self.current_epoch))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(float(os.environ.get("PAUSE", "0")))
        return super().training_step(batch, batch_idx)


class Ordered(DigitsDataModule):
    """Its epochs are alike: Lightning does not keep the order of a shuffled one."""

    def train_dataloader(self) -> Any:
        return DataLoader(super().train_dataloader().dataset, self.batch_size)


@pytest.fixture
def configure(tmp_path: Path) -> Configure:
    """Composes a small job whose run folder is `tmp_path / folder`."""

    def configured(*overrides: str, name: str = "train", folder: str = "run") -> DictConfig:
        paths = (f"paths.output_dir={tmp_path / folder}", "paths.work_dir=.")
        small = SMALL if name == "train" else ("trainer.accelerator=cpu", "trainer.devices=2")
        with initialize_config_module("lightning_dp.conf", version_base="1.3"):
            return compose(name, overrides=[*paths, *small, *overrides])

    return configured


@pytest.fixture
def log_file(tmp_path: Path) -> Iterator[Path]:
    """A log as Hydra opens it."""
    (tmp_path / "run").mkdir()
    handler = logging.FileHandler(tmp_path / "run" / "train.log")
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    yield tmp_path / "run" / "train.log"
    root.setLevel(level)
    root.removeHandler(handler)
    handler.close()


def of_class(kind: type) -> str:
    return f"model._target_={HERE}.{kind.__name__}"


# On one device: its batch norm sees whole batches, whatever shards the first ones are cut into.
ALIKE = (f"data._target_={HERE}.Ordered", "trainer.devices=1")


def state(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(path, weights_only=True)
    return loaded


# --- checkpoints ----------------------------------------------------------------------------------


def test_the_last_checkpoint_is_the_last_state(configure: Configure, tmp_path: Path) -> None:
    as_program(train)(configure(of_class(Worse)))
    folder = tmp_path / "run" / "checkpoints"
    assert {path.name for path in folder.iterdir()} == {"epoch_000.ckpt", "last.ckpt"}
    best, last = state(folder / "epoch_000.ckpt"), state(folder / "last.ckpt")
    assert (best["epoch"], best["global_step"]) == (0, 3)
    assert (last["epoch"], last["global_step"]) == (2, 9)
    knows = [s["best_model_path"] for s in last["callbacks"].values() if s.get("monitor")]
    assert str(folder / "epoch_000.ckpt") in knows


@pytest.mark.parametrize("experiment", ["digits", "gan", "denoise", "contrastive", "stdlib_lm"])
def test_every_experiment_keeps_its_last_state(experiment: str, configure: Configure) -> None:
    with initialize_config_module("lightning_dp.conf", version_base="1.3"):
        callbacks = compose("train", overrides=[f"experiment={experiment}"]).callbacks
    assert (callbacks.last_checkpoint.filename, callbacks.last_checkpoint.monitor) == ("last", None)
    assert callbacks.interrupted_checkpoint
    names = list(callbacks)
    if "model_checkpoint" in names:  # the first one is the Trainer's; the other one saves its state
        assert callbacks.model_checkpoint.monitor
        assert names.index("model_checkpoint") < names.index("last_checkpoint")


@pytest.mark.slow
@pytest.mark.parametrize("experiment", ["gan", "denoise", "contrastive", "stdlib_lm"])
def test_every_experiment_goes_on_from_its_last_state(
    experiment: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def run(folder: str, *overrides: str) -> dict[str, Any]:
        with initialize_config_module("lightning_dp.conf", version_base="1.3"):
            cfg = compose(
                "train",
                overrides=[
                    *(f"experiment={experiment}", "logger=none"),
                    *("trainer=cpu", "trainer.devices=2", "trainer.limit_train_batches=2"),
                    *("strategy.executor=inorder", "paths.work_dir=.", "test=false"),
                    *(f"paths.output_dir={tmp_path / folder}", *overrides),
                ],
            )
        as_program(train)(cfg)
        return state(tmp_path / folder / "checkpoints" / "last.ckpt")

    whole = run("whole", "trainer.max_epochs=3")
    run("half", "trainer.max_epochs=2")
    path = tmp_path / "half" / "checkpoints" / "last.ckpt"
    with caplog.at_level(logging.INFO):
        resumed = run("resumed", "trainer.max_epochs=3", f"ckpt_path={path}")
    assert "goes on at epoch 2 (the last is 2), step" in caplog.text
    ends = [(end["epoch"], end["global_step"]) for end in (resumed, whole)]
    assert ends[0] == ends[1]


def test_what_is_resumed_says_from_where(
    configure: Configure, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    as_program(train)(configure("trainer.max_epochs=2"))
    path = tmp_path / "run" / "checkpoints" / "last.ckpt"
    with caplog.at_level(logging.INFO):
        as_program(train)(configure(f"ckpt_path={path}", folder="on"))
        said = f"{path}: the training goes on at epoch 2 (the last is 2), step 6"
        assert caplog.messages.count(said) == 1
        caplog.clear()
        as_program(train)(configure(f"ckpt_path={path}", "trainer.max_epochs=2", folder="end"))
    said = f"{path}: nothing is left to train after 2 epochs and 6 steps; a larger "
    assert f"{said}trainer.max_epochs (or max_steps) goes on" in caplog.messages
    assert not list((tmp_path / "end").glob("checkpoints/*")), "nothing was trained"
    assert read_json(tmp_path / "end" / "metrics.json")["test/acc"] >= 0


@pytest.mark.slow
def test_a_finished_run_whose_best_state_is_gone_is_tested_as_it_is(
    configure: Configure, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    as_program(train)(configure(of_class(Worse), "trainer.max_epochs=2"))
    path = shutil.move(tmp_path / "run" / "checkpoints" / "last.ckpt", tmp_path / "moved.ckpt")
    shutil.rmtree(tmp_path / "run")
    overrides = (of_class(Worse), f"ckpt_path={path}", "trainer.max_epochs=2")
    as_program(train)(configure(*overrides, folder="again"))
    assert "epoch_000.ckpt, which does not exist: the last weights are tested" in caplog.text
    assert (tmp_path / "again" / "metrics.json").is_file()


@pytest.mark.slow
def test_a_run_that_early_stopping_has_ended_is_over(
    configure: Configure, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    patience = "callbacks.early_stopping.patience="
    as_program(train)(configure(of_class(Worse), "trainer.max_epochs=9", f"{patience}1"))
    path = tmp_path / "run" / "checkpoints" / "last.ckpt"
    assert state(path)["epoch"] == 1
    overrides = (of_class(Worse), "trainer.max_epochs=9", f"ckpt_path={path}")
    with caplog.at_level(logging.INFO):
        as_program(train)(configure(*overrides, f"{patience}1", folder="end"))
    said = "nothing is left to train after 2 epochs and 6 steps; a larger callbacks.early_stopping"
    assert said in caplog.text
    assert not (tmp_path / "end" / "checkpoints").exists()
    as_program(train)(configure(*overrides, f"{patience}3", folder="on"))
    assert state(tmp_path / "on" / "checkpoints" / "last.ckpt")["epoch"] == 3


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch")
@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("validation", RuntimeError),
        *(
            pytest.param(where, error, marks=pytest.mark.slow)
            for where in WHERE
            for error in (RuntimeError, KeyboardInterrupt)
        ),
    ],
)
def test_an_error_leaves_a_state_to_go_on_from(
    where: str,
    error: type[BaseException],
    configure: Configure,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    as_program(train)(configure(*ALIKE, folder="whole"))
    monkeypatch.setattr(Fails, "where", where)
    monkeypatch.setattr(Fails, "error", error)
    is_interrupt = error is KeyboardInterrupt
    with pytest.raises(SystemExit if is_interrupt else error):
        as_program(train)(configure(of_class(Fails), *ALIKE))
    path = tmp_path / "run" / "checkpoints" / "interrupted.ckpt"
    printed = capsys.readouterr().err
    assert ("Interrupted. " if is_interrupt else "Failed. ") + "Run folder: " in printed
    assert f"To go on: ckpt_path={path}" in printed
    with caplog.at_level(logging.INFO):
        as_program(train)(configure(of_class(Fails), *ALIKE, f"ckpt_path={path}", folder="on"))
    at = "epoch 1 (the last is 2), batch 1, step 4" if where == "training" else ", step 6"
    assert at in caplog.text
    ends = [state(tmp_path / f / "checkpoints" / "last.ckpt") for f in ("on", "whole")]
    assert [(end["epoch"], end["global_step"]) for end in ends] == [(2, 9)] * 2
    if where != "training":  # a loader begins its epoch anew, as Lightning warns
        weights = [end["state_dict"] for end in ends]
        assert_equal_trees(*weights, "resumed", atol=1e-6, rtol=0)
        seen = [
            end["callbacks"]["EarlyStopping{'monitor': 'val/loss', 'mode': 'min'}"] for end in ends
        ]
        # What has failed after the validation is validated once more.
        again = int(where == "end")
        assert seen[0]["wait_count"] in (seen[1]["wait_count"], seen[1]["wait_count"] + again)
        assert_equal_trees(*[s["best_score"] for s in seen], "validated", atol=1e-6, rtol=0)


@pytest.mark.slow
def test_a_run_is_evaluated_in_its_best_state(configure: Configure, tmp_path: Path) -> None:
    trained = as_program(train)(configure(of_class(Worse)))
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    options = (f"run={tmp_path / 'elsewhere'}", "trainer.limit_test_batches=1")
    cfg = configure(*options, name="eval", folder="eval")
    tested = as_program(evaluate)(cfg)
    assert tested.metrics["test/loss"] == trained.metrics["test/loss"]
    written = OmegaConf.load(tmp_path / "eval" / "config.yaml")
    assert written.ckpt_path == str(tmp_path / "elsewhere" / "checkpoints" / "epoch_000.ckpt")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="nobody is killed like this there")
@pytest.mark.parametrize("pause", [0.02, 0.1])
def test_a_killed_run_loses_at_most_an_epoch(pause: float, tmp_path: Path) -> None:
    options = ["trainer.max_epochs=12", "trainer.limit_train_batches=4", *SMALL[4:]]
    options += [of_class(WritesEpochs), *ALIKE, "trainer.accelerator=cpu"]
    options += ["test=false", "callbacks.early_stopping.patience=99"]
    at = tmp_path / "epoch"
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(Path(__file__).parent)])
    environment = {**os.environ, "EPOCHS": str(at), "PAUSE": str(pause), "PYTHONPATH": paths}

    def start(folder: str, *more: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "lightning_dp", *options, *more]
        pipe, joined = subprocess.PIPE, subprocess.STDOUT
        where = f"hydra.run.dir={tmp_path / folder}"
        return subprocess.Popen(
            [*command, where], cwd=tmp_path, env=environment, stdout=pipe, stderr=joined, text=True
        )

    killed = start("killed")
    end = time.monotonic() + 300
    while not at.is_file() or int(at.read_text() or 0) < 4:
        assert time.monotonic() < end and killed.poll() is None, killed.communicate()[0]
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    reached, last = int(at.read_text()), tmp_path / "killed" / "checkpoints" / "last.ckpt"
    assert state(last)["epoch"] >= reached - 1

    resumed = start("resumed", f"ckpt_path={last}")
    printed = resumed.communicate(timeout=300)[0]
    assert resumed.returncode == 0, printed
    goes_on = re.search(r"goes on at epoch (\d+) \(the last is 11\), step \d+", printed)
    assert goes_on and int(goes_on[1]) in (reached, reached + 1), printed
    whole = start("whole")
    printed = whole.communicate(timeout=300)[0]
    assert whole.returncode == 0, printed
    ends = [state(tmp_path / f / "checkpoints" / "last.ckpt") for f in ("resumed", "whole")]
    assert [end["epoch"] for end in ends] == [11, 11]
    assert_equal_trees(ends[0]["state_dict"], ends[1]["state_dict"], "resumed", atol=1e-6, rtol=0)


# --- the log --------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("always:the model's own")
def test_a_log_tells_a_run(log_file: Path, configure: Configure) -> None:
    as_program(train)(configure(of_class(Warns)))
    text = log_file.read_text()
    assert "\n  trainer.max_epochs: 3\n" in text and "${" not in text
    assert "devices: cpu, cpu\n" in text and "strategy: DataParallelStrategy" in text
    assert f"torch {torch.__version__}" in text
    assert text.count("UserWarning: the model's own (") == 1
    assert "`Trainer.fit` stopped: `max_epochs=3` reached." in text
    assert '"test/acc": ' in text
    assert re.search(r"ended after [\d.]+ s\n$", text)


@pytest.mark.slow
def test_a_log_ends_with_the_error(
    log_file: Path, configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Fails, "error", ArithmeticError)
    with pytest.raises(ArithmeticError):
        as_program(train)(configure(of_class(Fails)))
    text = log_file.read_text()
    assert "Traceback (most recent call last)" in text and "in training_step" in text
    assert "a plug was pulled" in text
    assert re.search(r"ended after [\d.]+ s: ArithmeticError\n$", text)


@pytest.mark.slow
def test_a_log_says_that_it_was_interrupted(
    log_file: Path, configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Fails, "error", KeyboardInterrupt)
    with pytest.raises(SystemExit):
        as_program(train)(configure(of_class(Fails)))
    text = log_file.read_text()
    assert re.search(r"ended after [\d.]+ s: interrupted\n$", text) and "Traceback" not in text


def test_a_sweeps_jobs_leave_no_handlers(log_file: Path, configure: Configure) -> None:
    loggers = [logging.getLogger(n) for n in ("lightning_dp.run", "lightning.pytorch")]
    before, shown = [list(logger.handlers) for logger in loggers], warnings.showwarning
    as_program(train)(configure("trainer.fast_dev_run=true"))
    assert [logger.handlers for logger in loggers] == before
    assert warnings.showwarning is shown


@pytest.mark.slow
def test_the_program_logs_what_differs_from_the_default_first(tmp_path: Path) -> None:
    command_line(*SMALL, "test=false", "~callbacks.early_stopping", cwd=tmp_path)
    (folder,) = (tmp_path / "logs" / "train" / "runs").iterdir()
    first, _, rest = (folder / "train.log").read_text().partition("\nall:\n")
    own = [line.strip() for line in first.splitlines()[2:]]
    assert "trainer.max_epochs: 3" in own and "model.width: 2" in own
    assert "callbacks.early_stopping.patience: left out" in own
    assert not [line for line in own if line.startswith(("trainer.strategy", "paths", "model.opt"))]
    assert "  model.optimizer.lr: 0.004\n" in rest and "ended after" in rest


REFUSED = [
    "trainer.devices=0",
    "+trainer.devces=2",
    "+model.bogus=1",
    "strategy.split=nonsense",
    "model.optimizer.lr=fast",
    "model.optimizer.lr=-1",
    "init_from=none.pt",
]


@pytest.mark.parametrize("option", REFUSED)
def test_a_refused_start_leaves_no_folder(
    option: str, log_file: Path, configure: Configure
) -> None:
    (log_file.parent / ".hydra").mkdir()
    (log_file.parent / ".hydra" / "config.yaml").touch()
    overrides = (option, "logger=csv")
    with pytest.raises(SystemExit):
        as_program(train)(configure(*overrides))
    assert not log_file.parent.exists()


@pytest.mark.parametrize("name", ["metrics.json", "notes", "checkpoints"])
def test_a_folder_with_anything_else_stays(name: str, log_file: Path, configure: Configure) -> None:
    (log_file.parent / name).mkdir()
    with pytest.raises(SystemExit):
        as_program(train)(configure("trainer.devices=0"))
    assert "trainer.devices: expected" in log_file.read_text()


def test_the_folder_one_is_in_stays(
    log_file: Path, configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(log_file.parent)
    with pytest.raises(SystemExit):
        as_program(train)(configure("trainer.devices=0"))
    assert log_file.is_file()


@pytest.mark.slow
def test_the_program_leaves_no_folder_when_it_refuses(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lightning_dp", "trainer.accelerator=cpu"]
    for option in ("trainer.devices=0", "trainer.devces=2", "model.optimizer.lr=fast"):
        done = subprocess.run([*command, option], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 1 and "Traceback" not in done.stderr
        assert not list(tmp_path.glob("logs/train/runs/*")), option


# --- one line -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("model.optimizer.lr=fast", "model.optimizer.lr: expected a number for .*, got 'fast'"),
        ("model.optimizer.lr=[1,2]", r"model.optimizer.lr: expected a number .*, got \[1, 2\]"),
        ("model.optimizer.lr=null", "model.optimizer.lr: expected a number for .*, got None"),
        ("model.optimizer.lr=-1", "model.optimizer: .* got lr=-1, .*Invalid learning rate: -1"),
        ("+model.optimizer.foreach=x", "model.optimizer.foreach: expected true or false or null"),
        (
            "+model.optimizer.weightdecay=1",
            "model.optimizer.weightdecay: .* mean .*weight_decay",
        ),
        ("model.scheduler.T_max=long", "model.scheduler.T_max: expected a whole number"),
        ("trainer.max_epochs=many", "trainer.max_epochs: expected a whole number or null .*'many'"),
        ("+trainer.devces=2", "trainer.devces: .* Did you mean trainer.devices"),
        ("callbacks.early_stopping.patience=long", "callbacks.early_stopping.patience: expected"),
        ("data.batch_size=large", "data.batch_size: expected a whole number for .*'large'"),
        ("data.batch_size=null", "data.batch_size: expected a whole number for .*, got None"),
        ("+data.bogus=1", "data.bogus: expected an option of .*, got 'bogus'"),
    ],
)
def test_an_option_that_cannot_be_used_is_one_line(
    option: str, message: str, configure: Configure, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        as_program(train)(configure(option))
    assert stop.value.code == 1
    printed = capsys.readouterr().err
    (line,) = printed[printed.index("error: ") :].splitlines()
    assert re.match(f"error: {message}", line), line
    assert "Traceback" not in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    "option",
    [
        "model.optimizer.lr=1e-3",
        "model.optimizer.weight_decay=0",
        "model.optimizer._target_=torch.optim.SGD",
        "trainer.max_epochs=null",
        "+trainer.val_check_interval=0.5",
        "trainer.deterministic=warn",
        "+trainer.benchmark=true",
        "trainer.limit_train_batches=0.1",
    ],
)
def test_what_can_be_used_is_used(option: str, configure: Configure) -> None:
    as_program(train)(configure(option, "train=false"))


@pytest.mark.parametrize("key", ["init_from", pytest.param("ckpt_path", marks=pytest.mark.slow)])
def test_weights_that_do_not_fit_are_told_in_a_few_keys(
    key: str, configure: Configure, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    as_program(train)(configure("trainer.max_epochs=1"))
    path = tmp_path / "run" / "checkpoints" / "last.ckpt"
    other = state(path)
    other["state_dict"] = nn.Sequential(*[nn.Linear(2, 2) for _ in range(9)]).state_dict()
    torch.save(other, tmp_path / "other.ckpt")
    capsys.readouterr()
    for options in ([f"{key}={tmp_path / 'other.ckpt'}"], [f"{key}={path}", "model.width=4"]):
        with pytest.raises(SystemExit):
            as_program(train)(configure(*options))
        printed = capsys.readouterr().err
        (line,) = printed[printed.index("error: ") :].splitlines()
        assert line.startswith(f"error: {key}: expected ") and "which does not fit: " in line
        assert len(line) < 700, line
        counts = r"\d+ missing keys: .*; 18 keys that are not the model's: 0\.weight, 0\.bias, 1\."
        assert re.search(counts if "other" in options[0] else r"\d+ of another size: strokes", line)


# --- quiet ----------------------------------------------------------------------------------------


def test_quiet_is_over_when_the_program_is() -> None:
    filters = list(warnings.filters)
    with quiet():
        pass
    assert warnings.filters == filters


def test_messages_go_where_a_progress_bar_expects_them(monkeypatch: pytest.MonkeyPatch) -> None:
    logger, before, bar = logging.getLogger("lightning.pytorch"), io.StringIO(), io.StringIO()
    handler = logging.StreamHandler(before)
    logger.addHandler(handler)
    try:
        with quiet():
            monkeypatch.setattr(sys, "stderr", bar)
            logger.warning("in between")
        logger.warning("afterwards")
    finally:
        logger.removeHandler(handler)
    assert "in between\n" in bar.getvalue() and before.getvalue() == "afterwards\n"


# --- folders and disks ----------------------------------------------------------------------------


def started(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    own = [option for option in SMALL if option != "logger=none"]
    command = [sys.executable, "-m", "lightning_dp", *own, "logger=csv", *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("sweep", [False, True], ids=["run", "sweep"])
def test_a_run_folder_that_cannot_be_made_is_one_line(sweep: bool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    option = "hydra.sweep.dir=file/jobs" if sweep else "hydra.run.dir=file/run"
    done = started(tmp_path, option, *(["-m"] if sweep else []))
    assert done.returncode == 1 and done.stderr.startswith("error: "), done.stderr
    assert done.stderr.strip().count("\n") == 0
    assert "expected a folder to write to, got 'file/" in done.stderr
    assert "Not a directory" in done.stderr and "paths.log_dir=FOLDER" in done.stderr


@pytest.mark.slow
def test_a_second_run_into_a_folder_is_told_of_the_first_one(tmp_path: Path) -> None:
    options = ("trainer.max_epochs=1", "test=false", "hydra.run.dir=my runs/first")
    first, second = (started(tmp_path, *options) for _ in range(2))
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    told = "has the files of an earlier run: metrics.csv and metrics.json are replaced"
    texts = [" ".join((done.stdout + done.stderr).split()) for done in (first, second)]
    assert [told in text for text in texts] == [False, True], texts[1]


@pytest.mark.parametrize("room", [0, 2])
def test_a_full_disk_is_one_line_with_the_way_on(
    room: int, log_file: Path, configure: Configure, capsys: Any
) -> None:
    """After so many checkpoints; the one of the interrupted training has no room either."""
    written: list[Path] = []

    def write(content: Any, path: Any, **_: Any) -> None:
        if len(written) >= room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        written.append(Path(path))
        Path(path).parent.mkdir(exist_ok=True)
        torch.save(content, path)

    full = mock.patch("lightning_dp.checkpointing.files.write", write)
    with full, pytest.raises(SystemExit) as stop:
        as_program(train)(configure())
    assert stop.value.code == 1
    said = capsys.readouterr().err
    (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert "expected room on the disk, got none (No space left on device)" in line
    assert f"Run folder: {log_file.parent}" in said and "paths.log_dir=FOLDER" in line
    assert ("To go on: ckpt_path=" in said) == bool(room)


def test_an_error_is_told_where_its_checkpoint_has_no_room(
    log_file: Path, configure: Configure, caplog: Any
) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "interrupted.ckpt")
    trainer, error = mock.Mock(), ValueError("a mistake in the model")
    trainer.state.fn, trainer.sanity_checking = TrainerFn.FITTING, False
    trainer.world_size, trainer.global_step, trainer.fast_dev_run = 1, 3, False
    trainer.save_checkpoint.side_effect = full
    InterruptedCheckpoint("folder").on_exception(trainer, mock.Mock(), error)
    assert "No space left on device" in caplog.text and "interrupted.ckpt" in caplog.text
