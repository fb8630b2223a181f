"""What processes log and measure in steps: in each of them the values of one device."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from metrics.test_logged_values import SIZES, History, Logging, log_rows
from support.oracle import Classifier, loader, trainer
from support.processes import run_in_processes
from torch import nn
from torchmetrics import CatMetric, MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score


def log_all(module: Any, batch: Any, batch_idx: int) -> None:
    """The law table of logged values; what is synced or of rank zero; a key from some batch on."""
    x = batch[0]
    # 1 may be the size of a shard, or a constant: a batch on one replica then weighs less.
    log_rows(module, batch, batch_idx, [name for name in SIZES if name != "one"])
    both = {"on_step": True, "on_epoch": True}
    module.log("synced", x.mean(), sync_dist=True, **both)
    module.log("zero", x.mean(), rank_zero_only=True, **both)
    for column in (0, 1):
        module.log("twice", x[:, column].mean())
    if batch_idx:
        module.log("late", x.mean().item(), **both)


class LogsAll(Logging):
    def __init__(self) -> None:
        super().__init__(log_all)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)
        self.log(f"val/{dataloader_idx}", self.loss(batch), add_dataloader_idx=False)


class Measures(Classifier):
    """Calls metrics of each kind by `forward` or by `update`, logs them and their values."""

    is_forward = True

    def __init__(self) -> None:
        super().__init__()
        several = [MulticlassAccuracy(3), MulticlassF1Score(3)]
        self.metrics = nn.ModuleDict(
            {
                "accuracy": MulticlassAccuracy(3, average="macro"),
                "auroc": MulticlassAUROC(3),  # its state is lists
                "several": MetricCollection(several),
            }
        )
        self.mean, self.cat, self.unused = MeanMetric(), CatMetric(), MeanMetric()
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x).detach()
        for name, metric in [*self.metrics.items(), ("mean", self.mean)]:
            arguments = (x.mean(),) if name == "mean" else (logits, y)
            value = metric(*arguments) if self.is_forward else metric.update(*arguments)
            if isinstance(metric, MetricCollection):
                self.log_dict(metric, on_step=self.is_forward, on_epoch=True)
                continue
            self.log(name, metric, on_step=self.is_forward, on_epoch=True)
            if value is not None:
                self.log(f"{name} value", value, on_step=True, on_epoch=True)
        self.cat.update(x[:, 0])
        return self.loss(batch)

    def on_train_epoch_end(self) -> None:
        self.seen.append(self.cat.compute().clone())
        self.cat.reset()
        self.log("rows", self.seen[-1].sum(), sync_dist=True, reduce_fx="max")


class Updates(Measures):
    is_forward = False


class OtherKeys(Classifier):
    """One process logs what the other does not."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_rank == 1:
            self.log("mine", 1.0)
        return self.loss(batch)


def logs_of(make: Callable[[], Classifier], devices: int, samples: int) -> list[Any]:
    torch.manual_seed(0)
    module, history = make(), History()
    job = trainer(devices, callbacks=[history])
    validated = [loader(samples), loader(samples - 4)] if make is LogsAll else None
    job.fit(module, loader(samples), validated)
    return [history.rows, dict(job.callback_metrics), getattr(module, "seen", None)]


def all_logs(devices: int, samples: int) -> list[Any]:
    torch.set_default_dtype(torch.float64)
    if devices > 1:
        with pytest.raises(ValueError, match=r"'mine'.* 0 on process1/cpu"):
            trainer(devices).fit(OtherKeys(), loader())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message=".*sync_dist.*")
        return [logs_of(make, devices, samples) for make in (LogsAll, Measures, Updates)]


@pytest.mark.parametrize(
    ("processes", "devices", "samples"),
    [(2, 4, 51), pytest.param(3, 3, 53, marks=pytest.mark.slow)],
)
def test_every_process_has_the_values_of_one_device(
    processes: int, devices: int, samples: int
) -> None:
    """The last batch has 1 sample or 3."""
    expected = all_logs(1, samples)
    for own in run_in_processes(all_logs, processes, devices, samples):
        torch.testing.assert_close(own, expected, rtol=1e-10, atol=1e-10, equal_nan=True)
