"""The programs: run folder, configuration and mistakes."""

import csv
import inspect
import itertools
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_module
from hydra.utils import instantiate
from lightning.pytorch.strategies import ParallelStrategy
from omegaconf import DictConfig, OmegaConf
from program_runs import ROOT, read_json

import lightning_dp
from lightning_dp import app
from lightning_dp.app import report
from lightning_dp.app.devices import check_devices, default_devices
from lightning_dp.app.evaluate import evaluate
from lightning_dp.app.quiet import quiet
from lightning_dp.app.run import INTERRUPTED, as_program
from lightning_dp.app.train import train
from lightning_dp.app.trained import as_trained

CONF = ROOT / "conf"
ON_CPU = ("trainer.accelerator=cpu",)

Configure = Callable[..., DictConfig]


@pytest.fixture
def configure(tmp_path: Path) -> Configure:
    """Composes a job whose run folder is `tmp_path / folder`."""

    def configured(*overrides: str, name: str = "train", folder: str = "run") -> DictConfig:
        paths = [f"paths.output_dir={tmp_path / folder}", "paths.work_dir=."]
        with initialize_config_module("lightning_dp.conf", version_base="1.3"):
            return compose(name, overrides=[*paths, *overrides])

    return configured


@pytest.fixture
def no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails a test that comes as far as loading data."""

    def load_digits(**_: Any) -> None:
        pytest.fail("data was loaded")

    monkeypatch.setattr("lightning_dp.examples.digits.load_digits", load_digits)


def run_in_process(job: Callable[[DictConfig], report.Report], cfg: DictConfig) -> report.Report:
    return as_program(job)(cfg)


# --- the run folder -------------------------------------------------------------------------------


def test_run_folder_holds_config_checkpoints_and_metrics(
    configure: Configure, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = ("trainer.devices=2", "trainer.max_epochs=2", "model.optimizer.lr=0.002")
    rows_and_steps = ("trainer.log_every_n_steps=10", "data.batch_size=96")
    result = run_in_process(train, configure(*ON_CPU, *overrides, *rows_and_steps))
    folder = tmp_path / "run"

    config = OmegaConf.load(folder / "config.yaml")
    assert "${" not in (folder / "config.yaml").read_text()
    assert config.model.optimizer.lr == 0.002
    assert config.trainer.strategy == config.strategy

    assert (folder / "checkpoints" / "last.ckpt").is_file()
    assert list((folder / "checkpoints").glob("epoch_*.ckpt"))

    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows if row["val/acc"]] == ["0", "1"]
    samples = [row["dp/cpu_1/samples"] for row in rows]
    cells = [cell for cell in samples if cell]
    assert cells == ["48.0"] * 3, "every tenth step of 30"

    metrics = read_json(folder / "metrics.json")
    assert metrics["test/acc"] == result.metrics["test/acc"] > 0.5
    assert metrics["devices"] == ["cpu:0", "cpu:1"]
    assert metrics["samples_per_device"] == [1440, 1440], "720 per epoch"
    assert len(metrics["busy_seconds_per_device"]) == 2
    assert all(seconds > 0 for seconds in metrics["busy_seconds_per_device"])
    assert len(metrics["waiting_seconds_per_device"]) == 2
    assert metrics["test_samples_per_device"] == [90, 90]
    assert (folder / "devices.png").read_bytes().startswith(b"\x89PNG")

    printed = capsys.readouterr().out
    assert f"test/acc {metrics['test/acc']:.4f}" in printed
    assert "50.0%" in printed
    assert "waiting" in printed
    assert str(folder / "devices.png") in printed
    assert f"run folder: {folder}" in printed


FEW = ("trainer.max_epochs=1", "trainer.limit_train_batches=2", "test=false", "logger=none")


@pytest.mark.slow
def test_without_matplotlib_one_line_says_what_to_install(
    configure: Configure,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    run_in_process(train, configure(*ON_CPU, *FEW, "trainer.devices=2"))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "pip install" in line]
    assert line.startswith("no devices.png: ")
    assert line.endswith("python -m pip install matplotlib")
    assert not (tmp_path / "run" / "devices.png").exists()
    assert (tmp_path / "run" / "metrics.json").is_file()


def test_the_table_says_that_replicas_took_turns(
    configure: Configure, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("trainer.devices=2", "strategy.executor=inorder")
    result = run_in_process(train, configure(*ON_CPU, *FEW, *options))
    printed = capsys.readouterr().out
    assert result.devices == ("cpu:0", "cpu:1") and all(
        f"│ {d} " in printed for d in result.devices
    )
    (line,) = [line for line in printed.splitlines() if "took turns" in line]
    assert line == result.note
    assert 'in all steps (executor="inorder")' in line


@pytest.mark.slow
def test_weights_become_shares(configure: Configure, tmp_path: Path) -> None:
    strategy = ("strategy.output_device=cpu", "strategy.weights=[1,2,3]")
    run_in_process(
        train, configure(*ON_CPU, "trainer.devices=3", *strategy, "trainer.max_epochs=1")
    )
    assert read_json(tmp_path / "run" / "metrics.json")["samples_per_device"] == [240, 480, 720]


def test_single_is_one_device_whatever_trainer_devices_says(
    configure: Configure, tmp_path: Path
) -> None:
    overrides = ("strategy=single", "trainer.devices=3", "trainer.limit_train_batches=2")
    few = ("trainer.max_epochs=1", "test=false", "logger=none")
    run_in_process(train, configure(*ON_CPU, *overrides, *few))
    metrics = read_json(tmp_path / "run" / "metrics.json")
    assert metrics["devices"] == ["cpu"]
    assert "samples_per_device" not in metrics, "nobody measured them"
    assert not (tmp_path / "run" / "devices.png").exists()
    assert OmegaConf.load(tmp_path / "run" / "config.yaml").trainer.devices == 1


@pytest.mark.slow
def test_checkpoint_is_evaluated_and_resumed(
    configure: Configure, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = (*ON_CPU, "trainer.devices=2")
    trained = run_in_process(train, configure(*common, "trainer.max_epochs=1"))
    checkpoint = tmp_path / "run" / "checkpoints" / "last.ckpt"

    cfg = configure(*common, f"ckpt_path={checkpoint}", name="eval", folder="eval")
    capsys.readouterr()
    tested = run_in_process(evaluate, cfg)
    assert tested.per_device == {"test_samples_per_device": [90, 90]}
    printed = capsys.readouterr().out
    assert "test samples" in printed and printed.count("50.0%") == 2
    assert tested.metrics["test/acc"] == trained.metrics["test/acc"]
    assert read_json(tmp_path / "eval" / "metrics.json")["test/acc"] == tested.metrics["test/acc"]

    run_in_process(
        train,
        configure(*common, f"ckpt_path={checkpoint}", "trainer.max_epochs=2", folder="resumed"),
    )
    resumed = torch.load(tmp_path / "resumed" / "checkpoints" / "last.ckpt", weights_only=True)
    assert (resumed["epoch"], resumed["global_step"]) == (1, 12)


@pytest.mark.slow
def test_a_run_is_evaluated_with_its_own_model_and_data(
    configure: Configure, tmp_path: Path
) -> None:
    common = (*ON_CPU, "trainer.devices=2")
    of_its_own = ("model.width=8", "data.split_seed=3", "trainer.max_epochs=1")
    trained = run_in_process(train, configure(*common, *of_its_own))
    cfg = configure(*common, f"run={tmp_path / 'run'}", name="eval", folder="eval")
    tested = run_in_process(evaluate, cfg)
    assert tested.metrics["test/acc"] == trained.metrics["test/acc"]
    written = OmegaConf.load(tmp_path / "eval" / "config.yaml")
    assert (written.model.width, written.data.split_seed) == (8, 3)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), (8, 3, "digits")),
        (("data.split_seed=5", "+data.more=1", "strategy=single"), (8, 5, "digits")),
        (("model=digits_crnn",), (16, 3, "digits")),
        (("model=digits_crnn", "model.width=4"), (4, 3, "digits")),
        (("experiment=digits",), (16, 0, "digits")),
        (("data=random_rows",), (8, None, "tutorial")),
    ],
)
def test_the_command_line_says_more_than_the_run(
    overrides: tuple[str, ...],
    expected: tuple[int, int, str],
    configure: Configure,
    tmp_path: Path,
) -> None:
    report.write_config(configure("model.width=8", "data.split_seed=3"), tmp_path)
    cfg = as_trained(configure(f"run={tmp_path}", *overrides, name="eval"), overrides)
    kind = cfg.data._target_.split(".")[-2]
    assert (cfg.model.width, cfg.data.get("split_seed"), kind) == expected
    assert cfg.data.get("more") == (1 if "+data.more=1" in overrides else None)
    assert cfg.ckpt_path == str(tmp_path / "checkpoints" / "last.ckpt")


def test_it_has_to_be_said_what_is_evaluated(configure: Configure, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ckpt_path: expected the checkpoint file to test, got n"):
        evaluate(configure(name="eval"))
    with pytest.raises(ValueError, match=r"run: expected the folder of a training, got .*nowhere"):
        evaluate(configure("run=nowhere", name="eval"))
    report.write_config(configure(), tmp_path)
    with pytest.raises(ValueError, match=r"ckpt_path: expected a checkpoint file, got .*last\."):
        evaluate(configure(f"run={tmp_path}", name="eval"))


def test_training_can_be_left_out(configure: Configure, tmp_path: Path) -> None:
    result = run_in_process(train, configure(*ON_CPU, "train=false", "trainer.devices=2"))
    assert set(result.metrics) == {"test/acc", "test/loss"}
    assert sum(result.per_device.pop("test_samples_per_device")) == 180
    assert not result.per_device
    assert not (tmp_path / "run" / "devices.png").exists()


# --- the configuration ----------------------------------------------------------------------------


def test_strategy_options_are_the_arguments_of_the_class() -> None:
    options = dict(OmegaConf.load(CONF / "strategy" / "dp_custom.yaml"))
    assert options.pop("_target_") == "lightning_dp.DataParallelStrategy"
    options.pop("defaults")
    # What every Lightning strategy takes (self, accelerator, precision_plugin, ...) is no option.
    of_lightning = inspect.signature(ParallelStrategy.__init__).parameters
    arguments = inspect.signature(lightning_dp.DataParallelStrategy.__init__).parameters
    ours = {name: p.default for name, p in arguments.items() if name not in of_lightning}
    assert options == ours


def test_every_strategy_option_has_a_comment() -> None:
    lines = (CONF / "strategy" / "dp_custom.yaml").read_text().splitlines()
    for before, line in itertools.pairwise(lines):
        if re.match(r"[a-z_]+:", line) and not line.startswith("_target_"):
            assert before.startswith("#"), line


# A search needs Hydra's plugin, and no evaluation has one: see test_program_choices.py.
GROUP_FILES = sorted(f for f in CONF.glob("*/*.yaml") if f.parent.name != "hparams_search")


def group_files() -> list[Any]:
    """Program and file; with the files, eval shares all but what its own defaults name."""
    firsts = {file.parent: file for file in reversed(GROUP_FILES)}.values()
    return [
        pytest.param(program, file, id=f"{program}-{file.parent.name}={file.stem}", marks=marks)
        for file in GROUP_FILES
        for program, marks in (
            ("train", []),
            ("eval", [] if file in firsts else [pytest.mark.slow]),
        )
    ]


@pytest.mark.parametrize(("program", "file"), group_files())
def test_every_option_of_every_group_composes(
    program: str, file: Path, configure: Configure
) -> None:
    checkpoint = ["ckpt_path=some.ckpt"] if program == "eval" else []
    cfg = configure(f"{file.parent.name}={file.stem}", *checkpoint, name=program)
    OmegaConf.to_container(cfg, resolve=True)


@pytest.mark.parametrize(
    ("gpus", "devices", "expected"),
    [
        (0, "null", ("cpu", 4)),
        (1, "null", ("cpu", 4)),
        (2, "null", ("gpu", -1)),
        (1, "[cuda:0,cuda:0]", ("gpu", -1)),
        (2, "[cpu,cpu]", ("cpu", 4)),
        (1, "[0,0]", ("gpu", -1)),
    ],
)
def test_default_devices(
    gpus: int,
    devices: str,
    expected: tuple[str, int],
    configure: Configure,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(app.devices, "cores", lambda: 64)
    trainer = configure(f"strategy.devices={devices}").trainer
    assert (trainer.accelerator, trainer.devices) == expected


@pytest.mark.parametrize(("cores", "replicas"), [(1, 2), (2, 2), (3, 3), (4, 4), (64, 4)])
def test_a_cpu_has_a_replica_for_each_core_within_bounds(
    cores: int, replicas: int, configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app.devices, "cores", lambda: cores)
    assert configure("trainer.accelerator=cpu").trainer.devices == replicas


@pytest.mark.parametrize("strategy", ["dp_custom", "ddp", "single"])
def test_every_strategy_makes_a_trainer(strategy: str, configure: Configure) -> None:
    cfg = configure(*ON_CPU, f"strategy={strategy}")
    trainer = instantiate(cfg.trainer, logger=False)
    expected = 1 if strategy == "single" else default_devices("cpu")
    assert trainer.num_devices == expected


# --- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", ["0", "-1", "-3", "nonsense", "[0,1]", "1.5", "true", "null"])
def test_impossible_devices_are_refused_before_data_is_loaded(
    devices: str, configure: Configure, no_data: None
) -> None:
    with pytest.raises(ValueError, match=r"trainer\.devices: expected .*, got .*\. Try "):
        train(configure(*ON_CPU, f"trainer.devices={devices}"))


@pytest.mark.parametrize("devices", [0, -2, 3, [0, 2], [1, 1], [], "7,8", "x", None, True])
def test_unknown_gpus_are_refused(devices: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"trainer\.devices: expected a number from 1 to 2"):
        check_devices("gpu", devices)


@pytest.mark.parametrize("devices", [1, 2, -1, "-1", [0], [1, 0], "0,1", "auto"])
def test_known_gpus_are_accepted(devices: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_devices("gpu", devices)


@pytest.mark.parametrize(
    "option",
    [
        "strategy.weights=[1,2,3]",
        "strategy.weights=[0,0]",
        "strategy.weights=[-1,2]",
        "strategy.weights=[.nan,1]",
        "strategy.split=nonsense",
        "strategy.output_device=cuda:99",
        "strategy.devices=[cpu,cuda:99]",
        "strategy.executor=nonsense",
    ],
)
def test_unusable_strategy_options_end_the_program_with_one_message(
    option: str, configure: Configure, no_data: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        run_in_process(train, configure(*ON_CPU, "trainer.devices=2", option))
    assert stop.value.code == 1
    printed = capsys.readouterr().err
    message = printed[printed.index("error: ") :]
    assert "Traceback" not in printed
    assert "expected" in message
    assert "got" in message


def test_full_error_shows_everything(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(ValueError, match="expected"):
        run_in_process(train, configure(*ON_CPU, "trainer.devices=0"))


def test_missing_checkpoint_is_named(configure: Configure, no_data: None) -> None:
    with pytest.raises(ValueError, match=r"ckpt_path: expected .*, got 'no/such\.ckpt'"):
        train(configure(*ON_CPU, "ckpt_path=no/such.ckpt"))


def test_errors_of_the_model_keep_their_traceback(configure: Configure) -> None:
    def task(cfg: DictConfig) -> None:
        raise ValueError("the model's own")

    with pytest.raises(ValueError, match="the model's own"):
        as_program(task)(configure(*ON_CPU))


def test_interrupt_names_the_run_folder(
    configure: Configure, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def task(cfg: DictConfig) -> None:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as stop:
        as_program(task)(configure(*ON_CPU))
    assert stop.value.code == INTERRUPTED == 130
    assert str(tmp_path / "run") in capsys.readouterr().err


def test_a_job_leaves_the_process_as_it_was(configure: Configure) -> None:
    def task(cfg: DictConfig) -> None:
        os.environ["LOCAL_RANK"] = "0"
        torch.set_num_threads(threads + 1)

    environment, threads = dict(os.environ), torch.get_num_threads()
    as_program(task)(configure(*ON_CPU))
    assert dict(os.environ) == environment
    assert torch.get_num_threads() == threads


def test_quiet_drops_the_known_messages_only(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    with caplog.at_level(logging.INFO, logger.name), quiet():
        logger.info("💡 Tip: buy this")
        logger.info("GPU available: False, used: False")
        logger.info("GPU available: True (cuda), used: False")
        warnings.warn("The 'x' does not have many workers", UserWarning, stacklevel=1)
        with pytest.raises(UserWarning, match="real"):
            warnings.warn("a real problem", UserWarning, stacklevel=1)
    kept = [record.getMessage() for record in caplog.records]
    assert kept == ["GPU available: True (cuda), used: False"]
