"""Choices on the command line: mistyped ones, loggers, sweeps, and those without effect."""

import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from program_runs import command_line, read_json

from lightning_dp.app import build, report
from lightning_dp.app import train as train_program
from lightning_dp.app.callbacks import StepTimes
from lightning_dp.app.run import mistyped, sweep

Configure = Callable[..., DictConfig]
HAS_OPTUNA = importlib.util.find_spec("hydra_plugins") is not None


@pytest.fixture
def configure(tmp_path: Path) -> Configure:
    def configured(*overrides: str, **options: Any) -> DictConfig:
        paths = [
            f"paths.output_dir={tmp_path / 'run'}",
            f"paths.log_dir={tmp_path}",
            "paths.work_dir=.",
        ]
        with initialize_config_module("lightning_dp.conf", version_base="1.3"):
            return compose("train", overrides=[*paths, *overrides], **options)

    return configured


@pytest.fixture
def typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[Any, str]]:
    """Runs the main command in this process; its exit code and what it said on stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[Any, str]:
        argv = mock.patch.object(sys, "argv", ["lightning-dp", *arguments])
        with argv, pytest.raises(SystemExit) as stop:
            train_program.main()
        said = capsys.readouterr()
        told: Any = run
        told.printed = said.out
        is_text = isinstance(stop.value.code, str)
        return (1, f"{stop.value.code}\n") if is_text else (stop.value.code, said.err)

    return run


# --- mistyped -------------------------------------------------------------------------------------

MISTYPED = {
    "trainer.device=2": "trainer.device: expected .*got trainer.device=2. Did you mean "
    "trainer.devices or .*? To add it: [+]trainer.device=2$",
    "strategy=dp_adaptiv": "strategy: expected one of ddp, .*, single, got 'dp_adaptiv'. Did you "
    "mean dp_adaptive",
    "loger=csv": "loger: expected .* got loger=csv. Did you mean logger[?]",
    "devices=4": "devices: expected .*Did you mean trainer.devices or strategy.devices[?]",
    "model.optimizer.lrr=1": "Did you mean model.optimizer.lr",
    "experiment=contrastiv": "Did you mean contrastive",
    "strategy=nonsense": "strategy: expected one of ddp, .*, single, got 'nonsense'.$",
    "zzz=1": "zzz: expected a key or group that there is, got zzz=1. --cfg job shows all keys. ",
    "logger=[csv": "logger=.csv: expected KEY=VALUE as Hydra reads it",
    "+trainer.devices=4": "An item is already at 'trainer.devices'",
}


@pytest.mark.parametrize("mistake", MISTYPED)
def test_a_mistyped_option_is_one_line_with_the_nearest_name(
    mistake: str, typed: Any, tmp_path: Path
) -> None:
    code, said = typed(mistake)
    assert code == 1
    assert said.startswith("error: ") and said.count("\n") == 1
    assert re.search(MISTYPED[mistake], said), said
    assert not (tmp_path / "logs").exists(), "a run folder of nothing"
    assert "HYDRA_FULL_ERROR" not in os.environ


def test_among_right_options_the_wrong_one_is_named(typed: Any) -> None:
    _, said = typed("experiment=contrastive", "model.temprature=3")
    assert "Did you mean model.temperature?" in said, "a key of the experiment's model"
    _, said = typed("-m", "strategy=single,dp_adaptiv", "trainer.max_epochs=1")
    assert "Did you mean dp_adaptive?" in said and said.count("error") == 1


def test_full_error_is_hydras_own(typed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    argv = mock.patch.object(sys, "argv", ["lightning-dp", "loger=csv"])
    with argv, pytest.raises(Exception, match="Could not override 'loger'"):
        train_program.main()
    assert os.environ["HYDRA_FULL_ERROR"] == "1"


def test_the_task_finds_the_environment_as_the_user_left_it() -> None:
    with mistyped.composed_in_one_line("train"):
        assert os.environ["HYDRA_FULL_ERROR"] == "1"
        mistyped.task_begins()
        assert "HYDRA_FULL_ERROR" not in os.environ


# --- without effect -------------------------------------------------------------------------------


def test_a_strategy_that_the_trainer_does_not_take_is_an_error(typed: Any) -> None:
    code, said = typed("strategy=dp_adaptive", "trainer.strategy=ddp")
    assert code == 1
    assert "error: strategy=dp_adaptive: expected a Trainer that takes it" in said


def test_neither_training_nor_testing_is_nothing(configure: Configure) -> None:
    with pytest.raises(ValueError, match="train: expected train=true or test=true"):
        build.settle(configure("train=false", "test=false"))


def test_a_logger_that_debug_leaves_out_is_an_error(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = configure("debug=default", "logger=csv")
    monkeypatch.setattr(build, "task_overrides", lambda: ["debug=default", "logger=csv"])
    with pytest.raises(ValueError, match="logger=csv: expected a run that takes logger"):
        build.settle(cfg)
    monkeypatch.setattr(build, "task_overrides", lambda: ["debug=default", "logger=none"])
    build.settle(cfg)


@pytest.mark.parametrize("mode", ["dp_cost", "dp_custom"])
def test_missing_costs_are_told_before_data_is_loaded(
    mode: str, configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "lightning_dp.examples.digits.load_digits", lambda **_: pytest.fail("data was loaded")
    )
    cfg = configure(f"strategy={mode}", "strategy.split=cost", "trainer.accelerator=cpu")
    with pytest.raises(
        ValueError,
        match=r"expected a method sample_cost\(batch\) on DigitsCRNN, or "
        r"sample_cost='lengths' .*Define one of them, or use split='even'",
    ):
        train_program.train(cfg)


def test_one_device_needs_no_costs(configure: Configure) -> None:
    on_one = ("strategy=dp_cost", "trainer.accelerator=cpu", "trainer.devices=1", "callbacks=none")
    train_program.train(configure(*on_one, "trainer.fast_dev_run=true"))


# --- loggers --------------------------------------------------------------------------------------

LOGGERS = {
    "tensorboard": ("tensorboard", []),
    "wandb": ("wandb", ["logger.wandb.offline=true"]),
    "mlflow": ("mlflow", []),
    "aim": ("aim", []),
    "comet": ("comet_ml", ["logger.comet.online=false", "logger.comet.api_key=none"]),
}


@pytest.mark.parametrize("name", LOGGERS)
def test_a_logger_is_made_or_its_package_named(name: str, configure: Configure) -> None:
    module, offline = LOGGERS[name]
    cfg = configure(f"logger={name}", *offline)
    package = {"comet": "comet-ml"}.get(name, name)
    if importlib.util.find_spec(module) is None:
        with pytest.raises(ValueError, match=f"^logger={name}: .*: pip install {package}$"):
            build.loggers_of(cfg.logger)
    else:
        (logger,) = build.loggers_of(cfg.logger)
        assert type(logger).__name__.lower() == f"{name}logger"


def test_many_loggers_are_several_and_one_can_be_left_out(configure: Configure) -> None:
    assert [*configure("logger=many_loggers").logger] == ["csv", "tensorboard", "wandb"]
    assert configure("logger=many_loggers").logger.wandb.offline
    few = configure("logger=many_loggers", "~logger.wandb", "~logger.tensorboard")
    assert [type(logger).__name__ for logger in build.loggers_of(few.logger)] == ["CSVLogger"]


def test_other_mistakes_of_a_logger_stay_what_they_are(configure: Configure) -> None:
    cfg = configure("logger=csv", "+logger.csv.nonsense=1")
    with pytest.raises(Exception, match="nonsense"):
        build.loggers_of(cfg.logger)


# --- the profiler ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_profile_goes_to_files_that_are_named(tmp_path: Path) -> None:
    printed = command_line("debug=profiler", "trainer.accelerator=cpu", cwd=tmp_path)
    (folder,) = (tmp_path / "logs" / "debug" / "runs").iterdir()
    assert len(printed.splitlines()) < 60
    for name in ("fit-profile.txt", "test-profile.txt"):
        assert str(folder / name) in printed
        assert "run_training_epoch" in (folder / "fit-profile.txt").read_text()


@pytest.mark.parametrize("name", ["simple", "advanced", "pytorch"])
def test_every_profiler_writes_into_the_run_folder(name: str, tmp_path: Path) -> None:
    profiler = build.profiler_of(name, tmp_path)
    assert profiler.dirpath == tmp_path and profiler.filename == report.PROFILE


def test_there_is_no_other_profiler(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"trainer.profiler: expected one of simple, .*'fast'"):
        build.profiler_of("fast", tmp_path)


# --- sweeps ---------------------------------------------------------------------------------------


def test_step_times_are_within_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    times, clock = StepTimes(), iter([1.0, 1.5, 2.5, 99.0, 99.25])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    nothing: Any = None
    assert times.milliseconds is None
    for steps in (3, 2):
        times.on_train_epoch_start(nothing, nothing)
        for _ in range(steps):
            times.on_train_batch_end(nothing, nothing)
    assert times.milliseconds == 500, "the median of 0.5, 1 and 0.25 s"


def test_one_table_for_all_jobs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = {"test/acc": 0.5, "val/acc": 0.25, "ms_per_step": 12.34, "devices": ["cpu"]}
    jobs = [
        sweep.SweptJob(["seed=1", "strategy=single"], tmp_path / "0", None, found),
        sweep.SweptJob(["seed=1", "strategy=ddp"], tmp_path / "1", "ValueError: no"),
    ]
    sweep.show(jobs)
    text = capsys.readouterr().out
    head, first, second = [line for line in text.splitlines() if "│" in line or "┃" in line]
    assert "test/acc" in head and "val/acc" not in head and "ms per step" in head
    assert "strategy=single" in first and "0.5000" in first and "12.3" in first
    assert "strategy=ddp" in second and "failed" in second
    assert "seed=1" not in text, "alike in all"
    assert "job 1 failed: ValueError: no" in text
    assert f"sweep folder: {tmp_path}" in text


@pytest.mark.parametrize("outcome", [{}, {"val/loss": 1.0}])
def test_a_table_without_test_metrics(
    outcome: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = [sweep.SweptJob([], tmp_path / "0", None, outcome)]
    sweep.show([*jobs, sweep.SweptJob([], tmp_path / "1", "no")])
    text = capsys.readouterr().out
    assert text.count("failed") == 2 and ("1.0000" in text) == bool(outcome)


@pytest.mark.slow
def test_a_sweep_goes_on_without_the_jobs_that_fail(typed: Any, tmp_path: Path) -> None:
    few = ("trainer.max_epochs=1", "callbacks=none", "trainer.accelerator=cpu")
    axes = ("strategy=dp_custom,dp_cost,single", "trainer.devices=2")
    assert typed("-m", *axes, *few)[0] == 1
    (folder,) = (tmp_path / "logs" / "train" / "multiruns").iterdir()
    printed = typed.printed
    table = printed[printed.index(" job ") :]
    assert table.count("failed") == 2 and "job 1 failed: split='cost': expected" in table
    assert str(folder) in table
    for job in ("0", "2"):
        assert read_json(folder / job / "metrics.json")["ms_per_step"] > 0
    assert not sweep._jobs, "the next program's table begins empty"


@pytest.fixture
def optuna_in_the_store() -> Iterator[None]:
    """What the plugin registers, as its documentation has it; composition needs no more."""
    if HAS_OPTUNA:
        yield
        return
    store = ConfigStore.instance()
    keys = ("direction", "storage", "study_name", "n_trials", "n_jobs", "max_failure_rate")
    node = {"defaults": [{"sampler": "tpe"}], "params": None, **dict.fromkeys(keys)}
    sampler = dict.fromkeys(("seed", "n_startup_trials"))
    store.store(group="hydra/sweeper", name="optuna", node=node)
    store.store(group="hydra/sweeper/sampler", name="tpe", node=sampler)
    yield
    groups: Any = store.repo["hydra"]
    for name in ("optuna.yaml", "sampler"):
        groups["sweeper"].pop(name)


@pytest.mark.usefixtures("optuna_in_the_store")
def test_the_search_composes(configure: Configure) -> None:
    cfg = configure("hparams_search=digits_optuna", return_hydra_config=True)
    assert cfg.optimized_metric == "val/acc" and not cfg.test
    for key in cfg.hydra.sweeper.params:
        assert OmegaConf.select(cfg, key) is not None, f"there is no {key}"


@pytest.mark.skipif(HAS_OPTUNA, reason="the package is installed")
def test_without_the_sweeper_one_line_says_what_to_install(typed: Any) -> None:
    code, said = typed("-m", "hparams_search=digits_optuna")
    assert code == 1 and said.count("\n") == 1
    assert said.endswith("pip install hydra-optuna-sweeper\n")


@pytest.mark.slow
@pytest.mark.skipif(not HAS_OPTUNA, reason="needs hydra-optuna-sweeper")
def test_the_search_runs(tmp_path: Path) -> None:
    few = ("hydra.sweeper.n_trials=2", "trainer.max_epochs=1", "trainer.accelerator=cpu")
    printed = command_line("-m", "hparams_search=digits_optuna", *few, cwd=tmp_path)
    assert "Best value" in printed and printed.count("model.width=") >= 2


def test_numbers_that_a_sweeper_has_drawn_are_told_in_four_digits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = [
        sweep.SweptJob([f"model.lr={lr}", f"x={lr}a", f"n={i}"], tmp_path / str(i))
        for i, lr in enumerate(("0.0028057582311", "1.2345678e-05", "-0.25", "12345678"))
    ]
    sweep.show(jobs)
    table = capsys.readouterr().out
    for told in ("model.lr=0.002806 ", "model.lr=1.235e-05 ", "=-0.25 ", "model.lr=12345678 "):
        assert told in table, table
    assert "x=0.0028057582311a" in table  # no number
