"""torchmetrics over processes: in each of them the values that one device gives."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.oracle import Classifier
from support.processes import run_in_processes
from test_logs import logs_of
from torch import Tensor, nn
from torchmetrics import CatMetric, MaxMetric, MeanMetric, Metric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score
from torchmetrics.regression import PearsonCorrCoef
from torchmetrics.wrappers import ClasswiseWrapper, MinMaxMetric

RAGGED = (53, 51)


class Distinct(Metric):
    """How many classes were seen: needs its whole state in every update."""

    full_state_update = True

    def __init__(self) -> None:
        super().__init__()
        self.add_state("seen", torch.zeros(3), dist_reduce_fx=None)

    def update(self, logits: Tensor, target: Tensor) -> None:
        seen = self.seen.clone()
        seen[target.unique()] = 1
        self.seen = seen

    def compute(self) -> Tensor:
        return self.seen.sum()


def collection() -> MetricCollection:
    options: Any = {"num_classes": 3, "average": "macro"}
    own = [MulticlassAccuracy(**options), MulticlassF1Score(**options)]
    return MetricCollection([*own, MulticlassAUROC(num_classes=3)])


OF_LOGITS: dict[str, Callable[[], Any]] = {
    "acc": lambda: MulticlassAccuracy(3, average="micro"),
    "auroc": lambda: MulticlassAUROC(3),
    "distinct": Distinct,
    "minmax": lambda: MinMaxMetric(MulticlassAccuracy(3)),
    "sum": lambda: MulticlassAccuracy(3) + MulticlassF1Score(3),
}
OF_NUMBERS: dict[str, Callable[[], Metric]] = {
    "mean": MeanMetric,
    "total": SumMetric,
    "cat": CatMetric,
    "max": MaxMetric,
}


class Measures(Classifier):
    """Calls metrics by `forward` or by `update`, logs them and their values, computes some."""

    def __init__(self, how: str = "forward") -> None:
        super().__init__()
        self.how = how
        made = {
            f"{stage} {name}": make()
            for stage in ("train", "val")
            for name, make in [*OF_LOGITS.items(), *OF_NUMBERS.items()]
        }
        self.metrics = nn.ModuleDict(made)
        self.several = nn.ModuleDict({f"in {s}": collection() for s in ("train", "val")})
        self.classwise = ClasswiseWrapper(MulticlassAccuracy(3, average=None))
        self.hidden = [MulticlassAccuracy(3)]
        self.by_hook, self.idle, self.twice = SumMetric(), SumMetric(), SumMetric()
        self.pearson = PearsonCorrCoef()
        self.seen: list[Any] = []

    def measure(self, batch: Any, stage: str) -> None:
        x, y = batch
        logits = self(x).detach()
        forward = self.how == "forward"
        for name in OF_LOGITS:
            metric: Any = self.metrics[f"{stage} {name}"]
            value = metric(logits, y) if forward else metric.update(logits, y)
            if isinstance(value, Tensor):
                self.log(f"{stage}/{name} value", value, on_step=True, on_epoch=True)
            options = {} if name in ("cat", "minmax") else {"on_step": forward, "on_epoch": True}
            if name not in ("minmax", "sum"):
                self.log(f"{stage}/{name}", metric, **options)
        for name in OF_NUMBERS:
            metric = self.metrics[f"{stage} {name}"]
            value = {"total": x[:, 0].sum(), "max": x.max()}.get(name, x.mean())
            metric(value) if forward else metric.update(value)
            if name != "cat":
                self.log(f"{stage}/{name}", metric, on_step=forward, on_epoch=True)
        several: Any = self.several[f"in {stage}"]
        values = several(logits, y) if forward else several.update(logits, y) or {}
        self.log_dict({f"{stage}/{name} value": value for name, value in values.items()})
        self.log_dict(several, on_step=forward, on_epoch=True)
        if stage == "val":
            self.classwise.update(logits, y)
            self.hidden[0].update(logits, y)
            self.pearson.update(x[:, 0], x[:, 1])
            self.twice.update(x[:, 0].sum())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.measure(batch, "train")
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.measure(batch, "val")

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.measure(batch, "val")

    def on_validation_epoch_end(self) -> None:
        if self.trainer.sanity_checking:
            return
        own = [self.hidden[0], self.pearson, self.twice, self.metrics["val cat"]]
        values = [metric.compute().clone() for metric in own]
        values += [*self.classwise.compute().values(), self.idle.compute()]
        values += [*self.metrics["val minmax"].compute().values()]
        values.append(self.metrics["val sum"].compute())
        self.seen.append(values)
        for metric in own:
            metric.reset()
        self.classwise.reset()


def measured(devices: int, hows: list[str], sizes: list[int], executor: str = "auto") -> list[Any]:
    torch.set_default_dtype(torch.float64)
    results = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message=".*sync_dist.*")
        for how in hows:
            for samples in sizes:
                made: list[Any] = []

                def make(how: str = how, made: list[Any] = made) -> Measures:
                    made.append(Measures(how))
                    return made[0]

                options = {"strategy": {"executor": executor}} if devices else {}
                logs = logs_of(make, devices, samples, **options)
                results.append([logs, made[0].seen])
    torch.set_default_dtype(torch.float32)
    return results


CASES = [
    (2, 2, ["forward"], [51]),
    pytest.param(2, 2, ["update"], [53], marks=pytest.mark.slow),
    pytest.param(4, 1, ["forward", "update"], [53, 51], marks=pytest.mark.slow),
]


@pytest.mark.parametrize("processes, devices, hows, sizes", CASES)
def test_metrics_of_every_process_are_those_of_one_device(
    processes: int, devices: int, hows: list[str], sizes: list[int]
) -> None:
    expected = measured(0, hows, sizes)
    for own in run_in_processes(measured, processes, processes * devices, hows, sizes):
        torch.testing.assert_close(own, expected, rtol=1e-10, atol=1e-10, equal_nan=True)
