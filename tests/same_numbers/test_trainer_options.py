"""The Trainer: its entry points in any order, its options, profilers and checkpoints."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.utilities import CombinedLoader
from support import oracle
from support.oracle import (
    Classifier,
    assert_as_one_device,
    assert_equal_trees,
    assert_same,
    loader,
    run,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader

pytestmark = pytest.mark.usefixtures("on", "one_thread")

EXACT = {"atol": 1e-10, "rtol": 0.0}


def both(use: Callable[[Trainer], Any], **options: Any) -> None:
    """What `use` does with a Trainer of three devices is what it does with one."""
    torch.set_default_dtype(torch.float64)
    assert_as_one_device(lambda devices: use(oracle.trainer(devices, **options)))


# Entry points


@pytest.mark.parametrize(
    "order", list(itertools.permutations(["fit", "validate", "test", "predict"]))[::5], ids="-".join
)
def test_entry_points_in_any_order_and_twice(order: tuple[str, ...]) -> None:
    def use(job: Trainer) -> Any:
        found: list[Any]
        module, found = Classifier(), []
        for turn in range(2):
            job.fit_loop.max_epochs = turn + 1
            for entry in order:
                options = {"verbose": False} if entry in ("validate", "test") else {}
                arguments = (loader(), loader()) if entry == "fit" else (loader(),)
                found.append(getattr(job, entry)(module, *arguments, **options))
                found.append(dict(job.callback_metrics))
        return found, module.state_dict(), job.global_step

    both(use, max_epochs=1)


# Several data loaders


class Several(Classifier):
    """Takes batches of two loaders at once, of which one may have ended."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        parts = list(batch.values()) if isinstance(batch, dict) else batch
        loss = torch.stack([self.loss(part) for part in parts if part is not None]).mean()
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(parts[0][1]))
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val", self.loss(batch))
        self.log(f"of {dataloader_idx}", self.loss(batch), add_dataloader_idx=False)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return {"y": self.net(batch[0]), "from": f"{dataloader_idx}, {batch_idx}"}


def pair(n: int = 12) -> list[DataLoader[Any]]:
    """Two loaders with batches of one size, but not equally many."""
    return [loader(n=53, batch_size=n), loader(n=30, batch_size=n)]


@pytest.mark.parametrize("how", ["min_size", "max_size_cycle", "max_size"])
@pytest.mark.parametrize("keys", [("a", "b"), None])
def test_loaders_combined_for_training(how: Any, keys: Any) -> None:
    def use(job: Trainer) -> Any:
        module = Several()
        loaders: Any = [loader(n=50, batch_size=10), loader(n=30, batch_size=10)]
        if keys is not None:
            loaders = dict(zip(keys, loaders, strict=True))
        job.fit(module, CombinedLoader(loaders, how), pair())
        return module.state_dict(), dict(job.callback_metrics)

    both(use, max_epochs=2)


def test_loaders_in_a_list_for_everything_but_training() -> None:
    def use(job: Trainer) -> Any:
        module = Several()
        validated = job.validate(module, pair(), verbose=False)
        return validated, job.test(module, pair(), verbose=False), job.predict(module, pair())

    both(use)


def test_batches_of_other_sizes_in_one_dict_are_an_error_that_names_them() -> None:
    sizes = {"a": loader(n=20, batch_size=10), "b": loader(n=20, batch_size=5)}
    job = oracle.trainer(3, num_sanity_val_steps=0)
    with pytest.raises(ValueError, match=r"batch\['a'\].*10.*batch\['b'\].*5"):
        job.fit(Several(), CombinedLoader(sizes, "min_size"), loader())


# Options


class Resettable(Classifier):
    def train_dataloader(self) -> Any:
        return loader()

    def on_train_epoch_end(self) -> None:
        self.log("epoch", float(self.current_epoch))


@pytest.mark.parametrize(
    "options",
    [
        {"limit_train_batches": 2, "limit_val_batches": 1},
        {"limit_train_batches": 0.5, "limit_val_batches": 0.7, "limit_test_batches": 0.4},
        {"overfit_batches": 2},
        {"fast_dev_run": 2},
        {"max_steps": 4, "max_epochs": -1},
        {"min_epochs": 2, "max_epochs": 3, "check_val_every_n_epoch": 2},
        {"val_check_interval": 4, "check_val_every_n_epoch": None},
        {"num_sanity_val_steps": -1},
        {"reload_dataloaders_every_n_epochs": 1},
        {"inference_mode": False},
        {"detect_anomaly": True},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:You requested to overfit but enabled")
def test_options_of_the_trainer(options: dict[str, Any]) -> None:
    torch.set_default_dtype(torch.float64)
    data = lambda: loader(shuffle=False)
    results = [run(Resettable, devices, data=data, **options) for devices in (3, 1)]
    assert_same(*results)
    assert results[0].trainer.global_step == results[1].trainer.global_step


@pytest.mark.parametrize("on", ["cpu"], indirect=True)
@pytest.mark.parametrize("mode", ["step", "forward"])
def test_deterministic_runs_repeat_bit_by_bit(mode: str) -> None:
    """On accelerators autograd's threads add up forward mode's gradients as they arrive."""

    class Random(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.3)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(self.drop(x))

    runs = [run(Random, 3, deterministic=True, strategy={"mode": mode}) for _ in range(2)]
    assert_same(*runs, atol=0)


# Profilers


STAGES = ("scatter", "replicate", "apply", "gather", "backward", "reduce")


@pytest.mark.filterwarnings("ignore:.*Profiler clears events at the end of each cycle")
@pytest.mark.filterwarnings("ignore:The PyTorch Profiler default schedule will be overridden")
def test_profilers_see_the_stages(tmp_path: Path) -> None:
    fit = {"max_epochs": 1, "profiler": PyTorchProfiler(tmp_path, "profile")}
    oracle.trainer(3, **fit).fit(Classifier(), loader(), loader())
    assert "lightning_dp.apply" in (tmp_path / "fit-profile.txt").read_text()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        oracle.trainer(3, max_epochs=1).fit(Classifier(), loader(), loader())
    counts = {event.key: event.count for event in profile.key_averages()}
    assert all(counts[f"lightning_dp.{stage}"] >= 3 for stage in STAGES)


# Checkpoints


@pytest.mark.parametrize(("before", "after"), [(3, 1), (1, 3)])
def test_checkpoints_go_on_with_other_devices(before: int, after: int, tmp_path: Path) -> None:
    """Three epochs on any devices are the three epochs of one device, optimizer's state and all."""
    torch.set_default_dtype(torch.float64)

    def fit(devices: int, epochs: int, path: Path | None = None) -> tuple[Any, Path]:
        torch.manual_seed(0)
        job = oracle.trainer(devices, "dp_custom" if devices > 1 else "auto", max_epochs=epochs)
        job.fit(Classifier(), loader(), loader(), ckpt_path=path)
        saved = tmp_path / f"{devices}-{epochs}.ckpt"
        job.save_checkpoint(saved)
        return torch.load(saved, weights_only=True), saved

    expected, _ = fit(1, 3)
    resumed, _ = fit(after, 3, fit(before, 2)[1])
    assert_equal_trees(resumed, expected, "resumed", **EXACT)
