"""The Trainer's options and Lightning's callbacks in several processes: all decide alike."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from cases import Case, assert_as_on_one_device
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
    timer,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from oracle import Classifier, assert_equal_trees, loader
from several_processes import run_in_processes

import lightning_dp
from lightning_dp import DataParallelMonitor

timer_of_lightning: Any = timer
pytestmark = pytest.mark.filterwarnings("ignore:You requested to overfit but enabled")


class Watched(Classifier):
    """Logs at the ends of epochs what is the same in every process; it has a schedule."""

    def on_validation_epoch_end(self) -> None:
        self.log("size", sum(p.detach().square().sum() for p in self.parameters()))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 0.05)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)]


def stopping_early() -> Mapping[str, Any]:
    return {"callbacks": [EarlyStopping("size", patience=1)], "max_epochs": 7}


def averaging() -> Mapping[str, Any]:
    return {"callbacks": [EMAWeightAveraging(decay=0.7)], "max_epochs": 3}


def stochastic_averaging() -> Mapping[str, Any]:
    return {"callbacks": [StochasticWeightAveraging(0.01, swa_epoch_start=1)], "max_epochs": 3}


OPTIONS: list[Any] = [
    {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05},
    {"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value", "num_sanity_val_steps": -1},
    {"limit_train_batches": 2, "limit_val_batches": 1, "limit_test_batches": 2},
    {"overfit_batches": 2, "inference_mode": False},
    {"val_check_interval": 2, "reload_dataloaders_every_n_epochs": 1},
    {"val_check_interval": 4, "check_val_every_n_epoch": None, "max_steps": 5, "max_epochs": -1},
    {"limit_train_batches": 0.5, "limit_predict_batches": 1, "limit_val_batches": 0},
    {"fast_dev_run": 2},
    {"detect_anomaly": True, "use_distributed_sampler": False},
    stopping_early,
    averaging,
    stochastic_averaging,
]
SOME = [OPTIONS[i] for i in (0, 4, 6, 9)]


def test_options_and_callbacks() -> None:
    assert_as_on_one_device([Case(Watched, {}, own, 51) for own in SOME], metrics=False)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.filterwarnings("ignore:.*swa_lrs|.*Swapping scheduler")
@pytest.mark.parametrize("mode", ["step", "forward"])
def test_each_of_them(mode: str) -> None:
    cases = [Case(Watched, {"mode": mode}, own, 51) for own in OPTIONS]
    assert_as_on_one_device(cases, metrics=False)


# Time


class Clock:
    """Goes so many times as fast as the others'."""

    def __init__(self, speed: float) -> None:
        self._speed, self._began = speed, time.monotonic()

    def monotonic(self) -> float:
        return self._began + (time.monotonic() - self._began) * self._speed


def steps_in_an_hour(fast: int) -> int:
    """How many steps a fit of an hour makes where the clock of one process is fast."""
    job = oracle.trainer(2, max_time={"hours": 1}, max_epochs=3)
    timer_of_lightning.time = Clock(1e7 if job.global_rank == fast else 1)
    job.fit(Classifier(), loader(), loader())
    timer_of_lightning.time = time
    return job.global_step


def all_hours() -> list[int]:
    return [steps_in_an_hour(fast) for fast in (0, 1)]


def test_the_time_is_that_of_the_first_process() -> None:
    first, second = run_in_processes(all_hours, 2)
    assert first == second and first[0] < 9 == first[1]


# Checkpoints, and what looks for good values before training


def saved(folder: str, devices: int, epochs: int, ckpt_path: str | None = None) -> Any:
    """The checkpoint at the end of a fit, and which files there are."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    saving = ModelCheckpoint(folder, "{epoch}", monitor="size", mode="max", save_last=True)
    rates = LearningRateMonitor()
    job = oracle.trainer(
        devices,
        callbacks=[saving, rates],
        logger=CSVLogger(folder),
        max_epochs=epochs,
        enable_checkpointing=True,
    )
    job.fit(Watched(), loader(51), loader(51), ckpt_path=ckpt_path)
    path = Path(folder, f"{devices}-{epochs}.ckpt")
    job.save_checkpoint(path)
    content = torch.load(path, weights_only=True)
    content.pop("callbacks")  # which name files
    content.pop("loops")  # which count logged steps
    content.pop("lightning_dp", None)  # where the data of several processes are
    return {**content, "rates": rates.lrs}, sorted(p.name for p in Path(folder).glob("*.ckpt"))


def handed_over(folder: str, from_one: str) -> list[Any]:
    """Two epochs here, and the third after two epochs on one device."""
    own = saved(f"{folder}/own", 4, 2)
    return [own, saved(f"{folder}/next", 4, 3, from_one)]


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.filterwarnings("ignore:The dirpath has changed from")
def test_checkpoints_are_written_once_and_go_on_anywhere(tmp_path: Path) -> None:
    on_one, names = saved(f"{tmp_path}/one", 1, 2)
    three, _ = saved(f"{tmp_path}/three", 1, 3)
    path = f"{tmp_path}/one/1-2.ckpt"
    for (own, own_names), (resumed, _) in run_in_processes(handed_over, 2, str(tmp_path), path):
        assert own_names == [name.replace("1-2", "4-2") for name in names]
        assert_equal_trees(own, on_one, "two epochs", atol=1e-10, rtol=0)
        assert_equal_trees(resumed["state_dict"], three["state_dict"], "", atol=1e-10, rtol=0)
    back, _ = saved(f"{tmp_path}/back", 1, 3, f"{tmp_path}/own/4-2.ckpt")
    assert_equal_trees(back["state_dict"], three["state_dict"], "back", atol=1e-10, rtol=0)


def tuned(devices: int, folder: str) -> Any:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    module = Classifier()
    job = oracle.trainer(devices, default_root_dir=folder, max_epochs=1)
    finder = Tuner(job).lr_find(module, loader(200, 10), loader(), num_training=15)
    assert finder is not None
    return finder.results, module.lr, dict(module.state_dict())


@pytest.mark.slow
def test_the_learning_rate_finder(tmp_path: Path) -> None:
    expected = tuned(1, str(tmp_path))
    for own in run_in_processes(tuned, 2, 4, str(tmp_path)):
        assert_equal_trees(own, expected, "tuned", atol=1e-10, rtol=0)


class Sized(Classifier):
    """Makes its own loader, of batches whose size a tuner may choose."""

    batch_size = 2

    def train_dataloader(self) -> Any:
        return loader(53, self.batch_size)

    val_dataloader = train_dataloader


def sized(devices: int, folder: str) -> str:
    job = oracle.trainer(devices, default_root_dir=folder, max_epochs=1)
    with pytest.raises(ValueError, match="no BatchSizeFinder in several processes") as caught:
        Tuner(job).scale_batch_size(Sized(), max_trials=3, steps_per_trial=2)
    return str(caught.value)


def test_the_tuner_of_batch_sizes_is_refused(tmp_path: Path) -> None:
    first, second = run_in_processes(sized, 2, 2, str(tmp_path))
    assert first == second


# What a strategy looks at, and how its replicas run


class OfPairs(Classifier):
    """Its loss is no mean over samples."""

    def loss(self, batch: Any) -> torch.Tensor:
        z = self(batch[0]).softmax(1)
        return (z @ z.T).logsumexp(1).mean() + super().loss(batch)


def looked_at() -> list[Any]:
    """What the check of the first step finds in each process, of a right and of a wrong loss."""
    found: list[Any] = []
    for make in (Classifier, OfPairs):
        strategy = lightning_dp.DataParallelStrategy(check_first_step=True)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            oracle.trainer(4, strategy, max_epochs=1).fit(make(), loader(), loader())
        first = strategy.first_step
        assert first is not None
        texts = [str(w.message) for w in told if "check_first_step" in str(w.message)]
        found.append((first.sizes, first.is_same, list(first.causes), len(texts)))
    return found


def test_each_process_checks_its_first_step() -> None:
    right, wrong = zip(*run_in_processes(looked_at, 2), strict=True)
    assert [(sum(sizes), is_same) for sizes, is_same, *_ in right] == [(13, True), (12, True)]
    assert all(not is_same and causes and texts for _, is_same, causes, texts in wrong)


SPLITS: list[dict[str, Any]] = [
    {"check_first_step": True},
    {"split": "auto"},
    {"split": "adaptive"},
    {"split": "chunk"},
    {"executor": "threads"},
    {"executor": "inorder"},
]


@pytest.mark.slow
def test_splits_and_executors_within_processes() -> None:
    cases = [Case(Watched, own, {"max_epochs": 4}, 51) for own in SPLITS]
    assert_as_on_one_device(cases, metrics=False)


def watched() -> tuple[Any, Any, Any]:
    """What a process sees of its devices."""
    monitor = DataParallelMonitor()
    job = oracle.trainer(4, callbacks=[monitor], max_epochs=1)
    job.fit(Classifier(), loader(), loader())
    return monitor.devices, monitor.total.samples, [u.samples for u in job.strategy.usage]


def test_each_process_watches_its_own_devices() -> None:
    (devices, samples, used), (_, others, _) = run_in_processes(watched, 2)
    assert len(devices) == 2 and list(samples) == used
    assert sum(samples) + sum(others) == 53


# Evaluation


def evaluated(devices: int) -> list[Any]:
    """What each entry point gives by itself, in both modes."""
    torch.set_default_dtype(torch.float64)
    found: list[Any] = []
    for mode in ("step", "forward"):
        torch.manual_seed(0)
        module = Classifier()
        options: dict[str, Any] = {"mode": mode}
        strategy = lightning_dp.DataParallelStrategy(**options)
        job = oracle.trainer(devices, strategy)
        job.validate(module, loader(51), verbose=False)
        job.test(module, loader(51), verbose=False)
        job.fit(module, loader(51), loader(51))
        found.append(dict(module.state_dict()))
    return found


def test_evaluation_before_training() -> None:
    expected = evaluated(1)
    for own in run_in_processes(evaluated, 2, 4):
        assert_equal_trees(own, expected, "state", atol=1e-10, rtol=0)
