"""What processes log and measure in steps: in each of them the values of one device."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from support.oracle import BATCH, SAMPLES, Classifier
from support.processes import run_in_processes
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import CatMetric, MeanMetric, Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score

import lightning_dp

RAGGED = (53, 51)  # the last batches have 3 samples and 1


def data(samples: int = SAMPLES, *, seed: int = 0) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 10, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (samples,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=BATCH)


def trainer(devices: int, strategy: dict[str, Any] | None = None, **options: Any) -> Trainer:
    """On one device where there are none: the oracle."""
    own: Any = lightning_dp.DataParallelStrategy(**(strategy or {})) if devices > 0 else "auto"
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    most = {"enable_checkpointing": False, "max_epochs": 2, "log_every_n_steps": 1}
    return Trainer(
        accelerator="cpu",
        devices=max(devices, 1),
        strategy=own,
        **{**quiet, **most, **options},
    )


class History(Callback):
    """What loggers, callbacks and the progress bar know after every batch."""

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def _look(self, job: Trainer) -> None:
        own = (job.callback_metrics, job.logged_metrics, job.progress_bar_metrics)
        self.rows.append([{k: torch.as_tensor(v).clone() for k, v in d.items()} for d in own])

    def on_train_batch_end(self, job: Any, *_: Any) -> None:
        self._look(job)

    def on_validation_end(self, job: Any, *_: Any) -> None:
        self._look(job)

    def on_train_end(self, job: Any, *_: Any) -> None:
        self._look(job)


def logs_of(
    make: Callable[[], Classifier], devices: int, samples: int, **options: Any
) -> list[Any]:
    seed_everything(1)
    module, history = make(), History()
    strategy = options.pop("strategy", None)
    job = trainer(devices, strategy, callbacks=[history], **options)
    job.fit(module.double(), data(samples), [data(samples, seed=1), data(samples, seed=2)])
    tested = job.test(module, [data(samples, seed=3), data(samples, seed=4)], verbose=False)
    return [history.rows, tested, dict(job.callback_metrics)]


def log_all(module: Classifier, batch: Any, prefix: str) -> None:
    """Values of all kinds, with all ways to reduce them."""
    x, y = batch
    n = len(x)
    both = {"on_step": True, "on_epoch": True}
    module.log(f"{prefix}/mean", x.mean(), prog_bar=True, **both)
    module.log(f"{prefix}/sum", x.sum(), reduce_fx="sum", **both)
    module.log(f"{prefix}/min", x.min(), reduce_fx="min", **both)
    module.log(f"{prefix}/max", x.max(), reduce_fx=torch.max, **both)
    module.log(f"{prefix}/builtin", x.max(), reduce_fx=max, **both)
    module.log(f"{prefix}/number", x.mean().item(), **both)
    module.log(f"{prefix}/int", y.sum(), reduce_fx="sum", **both)
    module.log(f"{prefix}/constant", 7, **both)
    module.log(f"{prefix}/tokens", x[:, 0].mean(), batch_size=7 * n, **both)
    valid = x[x[:, 0] > 0.5]
    module.log(f"{prefix}/valid", valid.mean(), batch_size=len(valid), on_epoch=True)
    module.log(f"{prefix}/tensor", valid.mean(), batch_size=(x[:, 0] > 0.5).sum(), on_epoch=True)
    module.log_dict({f"{prefix}/a": x[:, 2].mean(), f"{prefix}/b": x[:, 3].mean()}, sync_dist=True)
    for column in (0, 1):
        module.log(f"{prefix}/twice", x[:, column].mean())
    module.log(f"{prefix}/synced", x.mean(), sync_dist=True, **both)
    module.log(f"{prefix}/zero", x.mean(), rank_zero_only=True, **both)


class LogsAll(Classifier):
    """Logs values of all kinds in every step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        log_all(self, batch, "train")
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        log_all(self, batch, "val")
        self.log(f"val/{dataloader_idx}", self.loss(batch), add_dataloader_idx=False)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        log_all(self, batch, "test")


class LogsSometimes(LogsAll):
    """Logs from some batch on, another key in each epoch, and nothing in validation."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx > 0:
            self.log(f"train/{self.current_epoch}", self.loss(batch), on_step=True, on_epoch=True)
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        pass


def accuracy() -> Metric:
    return MulticlassAccuracy(3, average="macro")


KINDS: dict[str, Callable[[], Any]] = {
    "accuracy": accuracy,
    "auroc": lambda: MulticlassAUROC(3),  # its state is lists
    "mean": MeanMetric,
    "several": lambda: MetricCollection([accuracy(), MulticlassF1Score(3)]),
}


class Measures(Classifier):
    """Calls metrics of each kind by `forward` or by `update`, logs them and their values."""

    def __init__(self, how: str = "forward") -> None:
        super().__init__()
        self.how = how
        self.metrics = nn.ModuleDict(
            {
                f"{stage} {name}": make()
                for stage in ("train", "val")
                for name, make in KINDS.items()
            }
        )
        self.cat, self.unused = CatMetric(), MeanMetric()
        self.seen: list[Any] = []

    def measure(self, batch: Any, stage: str) -> None:
        x, y = batch
        logits, is_forward = self(x).detach(), self.how == "forward"
        for name in KINDS:
            metric: Any = self.metrics[f"{stage} {name}"]
            arguments = (x.mean(),) if name == "mean" else (logits, y)
            value = metric(*arguments) if is_forward else metric.update(*arguments)
            if name == "several":
                self.log_dict(metric, on_step=is_forward, on_epoch=True)
                continue
            self.log(f"{stage}/{name}", metric, on_step=is_forward, on_epoch=True)
            if value is not None:
                self.log(f"{stage}/{name} value", value, on_step=True, on_epoch=True)
        self.cat.update(x[:, 0])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.measure(batch, "train")
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.measure(batch, "val")

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.measure(batch, "val")

    def on_validation_epoch_end(self) -> None:
        self.seen.append(self.cat.compute().clone())
        self.cat.reset()
        self.log("rows", self.seen[-1].sum(), sync_dist=True, reduce_fx="max")


class Updates(Measures):
    def __init__(self) -> None:
        super().__init__("update")


MODULES = (LogsAll, LogsSometimes, Measures, Updates)


def all_logs(devices: int, sizes: Sequence[int] = RAGGED) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message=".*sync_dist.*")
        return {
            f"{make.__name__}, {samples}": logs_of(make, devices, samples)
            for make in MODULES
            for samples in sizes
        }


@pytest.mark.parametrize(
    ("processes", "devices", "sizes"),
    [(2, 2, [51]), pytest.param(4, 1, RAGGED, marks=pytest.mark.slow)],
)
def test_every_process_has_the_values_of_one_device(
    processes: int, devices: int, sizes: Sequence[int]
) -> None:
    expected = all_logs(0, sizes)
    for own in run_in_processes(all_logs, processes, processes * devices, sizes):
        torch.testing.assert_close(own, expected, rtol=1e-10, atol=1e-10, equal_nan=True)
