"""The training's last line: how long a step takes on all devices, and how long on one."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_module
from lightning.pytorch import LightningDataModule
from omegaconf import DictConfig, OmegaConf
from patience import Clock
from program_runs import read_json
from torch.utils.data import DataLoader, IterableDataset

from lightning_dp.app import compare
from lightning_dp.app.build import begin
from lightning_dp.app.compare import compared
from lightning_dp.app.run import as_program
from lightning_dp.app.train import train
from lightning_dp.doctor import Stopwatch
from lightning_dp.examples.digits import DigitsCRNN, DigitsDataModule

HERE = __name__
FEW = (
    "trainer.accelerator=cpu",
    "trainer.devices=4",
    "trainer.max_epochs=1",
    "trainer.limit_train_batches=2",
    "model.width=2",
    "data.batch_size=16",
    "logger=none",
    "callbacks=last_checkpoint",
)
LINE = re.compile(
    r"^\d+ devices: ([\d.]+) ms per step; 1 device: ([\d.]+) ms"
    r"(: one device would be faster here: .*)?$",
    re.MULTILINE,
)
PER_SAMPLE, PER_CALL, FIRST = 0.006, 0.03, 0.8

Configure = Callable[..., DictConfig]


CLOCK = Clock()


@pytest.fixture
def virtual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "clock", CLOCK)


class WorksForSamples(DigitsCRNN):
    """Each sample takes its time: four devices at once need a quarter of it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        CLOCK.work(PER_SAMPLE * len(batch[0]))
        return super().training_step(batch, batch_idx)


class WorksForCalls(DigitsCRNN):
    """Each call takes its time, one after another: four devices need four times as much."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        CLOCK.work(PER_CALL, alone=True)
        return super().training_step(batch, batch_idx)


class SlowFirst(DigitsCRNN):
    """Its first step makes what the others use."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        CLOCK.work(PER_CALL if batch_idx else FIRST)
        return super().training_step(batch, batch_idx)


class FailsAlone(DigitsCRNN):
    """Cannot be trained on one device."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.num_devices == 1:
            raise KeyError("nobody is\nbeside me")
        return super().training_step(batch, batch_idx)


class Stream(IterableDataset[Any]):
    """Nobody knows how long it is."""

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield torch.rand(1, 8, 8), torch.tensor(3)


class Streamed(DigitsDataModule):
    """Without end."""

    def train_dataloader(self) -> Any:
        return DataLoader(Stream(), batch_size=self.batch_size)


class Empty(LightningDataModule):
    """Trains on nothing."""

    def train_dataloader(self) -> Any:
        return DataLoader([])


@pytest.fixture
def configure(tmp_path: Path) -> Configure:
    """Composes a job; its run folder is `tmp_path / folder`."""

    def configured(*overrides: str, folder: str = "run") -> DictConfig:
        paths = (f"paths.output_dir={tmp_path / folder}", "paths.work_dir=.")
        with initialize_config_module("lightning_dp.conf", version_base="1.3"):
            return compose("train", overrides=[*paths, *overrides])

    return configured


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "SECONDS", 0.3)


def of_class(kind: type) -> str:
    return f"model._target_={HERE}.{kind.__name__}"


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out.rstrip().rpartition("\n")[2]


def times(line: str) -> tuple[float, float]:
    """Milliseconds on all devices and on one."""
    found = LINE.search(line)
    assert found, line
    return float(found[1]), float(found[2])


# --- what is measured -----------------------------------------------------------------------------


@pytest.mark.usefixtures("virtual")
def test_devices_that_share_the_work_are_told_as_faster(
    configure: Configure, capsys: pytest.CaptureFixture[str]
) -> None:
    as_program(train)(configure(*FEW, of_class(WorksForSamples)))
    line = last_line(capsys)
    assert times(line) == pytest.approx((4 * PER_SAMPLE * 1e3, 16 * PER_SAMPLE * 1e3))
    assert line.startswith("4 devices: ") and "faster" not in line


@pytest.mark.usefixtures("virtual")
def test_devices_that_wait_for_each_other_are_told_as_slower(
    configure: Configure, capsys: pytest.CaptureFixture[str]
) -> None:
    as_program(train)(configure(*FEW, of_class(WorksForCalls)))
    line = last_line(capsys)
    assert times(line) == pytest.approx((4 * PER_CALL * 1e3, PER_CALL * 1e3))
    assert line.endswith(": one device would be faster here: trainer.devices=1 or strategy=dp_auto")


@pytest.mark.parametrize(
    ("strategy", "ways"),
    [
        ({}, "trainer.devices=1 or strategy=dp_auto"),
        ({"devices": ["cpu", "cpu"]}, "strategy=single or strategy=dp_auto"),
        ({"split": "auto"}, "trainer.devices=1"),
    ],
)
def test_where_one_device_is_faster_it_says_how_to_take_one(strategy: Any, ways: str) -> None:
    told = compare._faster(OmegaConf.create(strategy))
    assert told == f"one device would be faster here: {ways}"


@pytest.mark.slow
@pytest.mark.usefixtures("virtual")
@pytest.mark.parametrize("executor", ["threads", "inorder"])
def test_replicas_run_as_they_are_told_to(configure: Configure, executor: str) -> None:
    cfg = configure(*FEW, of_class(WorksForSamples), f"strategy.executor={executor}")
    job = begin(cfg)
    job.data.setup("fit")
    samples = 4 if executor == "threads" else 16
    together, alone = times(str(compared(cfg, job)))
    assert (together, alone) == pytest.approx((samples * PER_SAMPLE * 1e3, 16 * PER_SAMPLE * 1e3))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Precision bf16-mixed is not supported by the model summary")
@pytest.mark.parametrize(
    "overrides",
    [
        ("strategy=dp_auto",),
        ("strategy=dp_adaptive",),
        ("strategy=dp_memory",),
        ("strategy=dp_custom_forward",),
        ("strategy.devices=[cpu,cpu,cpu,cpu]",),
        ("strategy.output_device=1", "strategy.weights=[1,2,3,4]"),
        ("trainer.accumulate_grad_batches=2", "trainer.gradient_clip_val=1.0"),
        ("trainer.precision=bf16-mixed", "+trainer.sync_batchnorm=true"),
        (f"data._target_={HERE}.Streamed", "data.num_workers=0"),
    ],
    ids=" ".join,
)
def test_other_ways_to_train_are_measured_too(configure: Configure, overrides: Any) -> None:
    cfg = configure(*FEW, *overrides)
    job = begin(cfg)
    job.trainer.fit(job.model, datamodule=job.data)
    assert min(times(str(compared(cfg, job)))) > 0


@pytest.mark.slow
@pytest.mark.parametrize("experiment", ["contrastive", "gan", "stdlib_lm"])
def test_experiments_are_measured(configure: Configure, experiment: str) -> None:
    few = ("trainer.limit_train_batches=1", "trainer.max_epochs=1", "logger=none")
    cfg = configure(f"experiment={experiment}", *few, "trainer.accelerator=cpu")
    job = begin(cfg)
    job.data.prepare_data()
    job.data.setup("fit")
    assert min(times(str(compared(cfg, job)))) > 0


# --- where it is not ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "overrides",
    [("compare=false",), ("strategy=single",), ("trainer.fast_dev_run=true",), ("train=false",)],
    ids=" ".join,
)
def test_nothing_is_said_where_there_is_nothing_to_compare(
    configure: Configure, capsys: pytest.CaptureFixture[str], overrides: tuple[str, ...]
) -> None:
    as_program(train)(configure(*FEW, *overrides))
    printed = capsys.readouterr().out
    assert "ms per step" not in printed
    assert "compared" not in printed


def test_a_strategy_with_processes_says_why_it_is_not_compared(configure: Configure) -> None:
    cfg = configure(*FEW, "strategy=ddp")
    line = compared(cfg, begin(cfg))
    assert line is not None
    assert line.startswith("not compared with 1 device: DDPStrategy starts processes")


def test_an_error_in_the_measurement_is_told_and_the_job_goes_on(
    configure: Configure, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    result = as_program(train)(configure(*FEW, of_class(FailsAlone)))
    assert last_line(capsys) == "not compared with 1 device: KeyError: 'nobody is\\nbeside me'"
    assert read_json(tmp_path / "run" / "metrics.json")["test/acc"] == result.metrics["test/acc"]


def test_without_a_batch_it_says_so(configure: Configure) -> None:
    cfg = configure(*FEW)
    job = begin(cfg)
    job.data.setup("fit")
    job.data.train_dataloader = Empty().train_dataloader
    line = "not compared with 1 device: ValueError: expected at least one training batch, got none."
    assert compared(cfg, job) == line


def test_a_strategy_of_which_there_is_no_second_one(configure: Configure) -> None:
    cfg = configure(*FEW, "trainer.strategy=dp_custom")
    job = begin(cfg)
    job.data.setup("fit")
    line = str(compared(cfg, job))
    assert line.startswith("not compared with 1 device: ValueError: trainer.strategy: expected")
    assert "'dp_custom'" in line


# --- what it leaves alone -------------------------------------------------------------------------


def state_of(job: Any) -> dict[str, Any]:
    """Everything that a measurement might change."""
    files = {path: path.read_bytes() for path in job.folder.rglob("*") if path.is_file()}
    trainer = job.trainer
    return {
        "files": files,
        "folders": sorted(path for path in job.folder.parent.rglob("*") if path.is_dir()),
        "weights": {k: v.tolist() for k, v in job.model.state_dict().items()},
        "training": job.model.training,
        "trainers": (job.model.trainer is trainer, job.data.trainer is trainer),
        "metrics": {k: float(v) for k, v in trainer.callback_metrics.items()},
        "steps": (trainer.global_step, trainer.current_epoch, trainer.should_stop),
        "random": (random.getstate(), torch.get_rng_state().tolist()),
        "numpy": str(np.random.get_state()),
        "threads": (torch.get_num_threads(), threading.active_count()),
        "callbacks": list(trainer.callbacks),
        "loaded": job.data.train_dataloader.__self__ is job.data,
    }


@pytest.mark.parametrize("strategy", ["dp_custom", pytest.param("dp_auto", marks=pytest.mark.slow)])
def test_it_leaves_no_trace(configure: Configure, strategy: str) -> None:
    cfg = configure(*FEW, f"strategy={strategy}")
    job = begin(cfg)
    job.trainer.fit(job.model, datamodule=job.data)
    before, learnt = state_of(job), job.trainer.strategy.split_policy
    assert LINE.match(str(compared(cfg, job)))
    after = state_of(job)
    assert {key for key in before if before[key] != after[key]} == set()
    assert job.trainer.strategy.split_policy is learnt


@pytest.mark.slow
def test_the_job_comes_out_the_same_with_it_and_without(
    configure: Configure, tmp_path: Path
) -> None:
    options = (*FEW, "strategy.executor=inorder")
    results = [
        as_program(train)(configure(*options, f"compare={said}", folder=said))
        for said in ("true", "false")
    ]
    assert results[0].metrics == results[1].metrics
    paths = [tmp_path / said / "checkpoints" / "last.ckpt" for said in ("true", "false")]
    states = [torch.load(path, weights_only=True) for path in paths]
    one, other = (state["state_dict"] for state in states)
    assert all(torch.equal(one[name], other[name]) for name in {*one, *other})
    assert str(states[0]["optimizer_states"]) == str(states[1]["optimizer_states"])
    left = [{path.name for path in (tmp_path / said).rglob("*")} for said in ("true", "false")]
    assert left[0] == left[1]


# --- the watch, which the doctor has too ----------------------------------------------------------


def test_a_watch_ends_a_fit_and_leaves_out_its_first_step(configure: Configure) -> None:
    """The first one is slow, and the others are enough before there are many."""
    cfg = configure(*FEW, "strategy=single", f"data._target_={HERE}.Streamed", of_class(SlowFirst))
    job, watch = begin(cfg), Stopwatch([], 5 * PER_CALL, CLOCK)
    job.trainer.callbacks.append(watch)
    job.trainer.fit_loop.min_epochs = 0
    job.trainer.limit_train_batches = 100
    job.trainer.fit(job.model, datamodule=job.data)
    assert 2 <= len(watch.seconds) < 20
    assert watch.seconds == pytest.approx([PER_CALL] * len(watch.seconds))
