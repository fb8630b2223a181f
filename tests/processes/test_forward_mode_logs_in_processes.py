"""Forward mode in several processes: they log and measure what one device does."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from oracle import ByHand as TrainsByHand
from oracle import Classifier
from several_processes import run_in_processes
from test_logs import LogsAll, LogsSometimes, data, logs_of, trainer
from test_metrics import Measures
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torchmetrics import MaxMetric, MeanMetric, SumMetric
from torchmetrics.classification import MulticlassAccuracy

FORWARD = {"mode": "forward"}
BOTH = {"on_step": True, "on_epoch": True}


class LogsAllByHand(TrainsByHand, LogsAll):
    """With manual optimisation."""


class SaysInForward(Classifier):
    """What spread calls log and measure; several of them in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.acc, self.updated = MulticlassAccuracy(3, average="micro"), SumMetric()
        self.largest, self.between = MaxMetric(), MulticlassAccuracy(3, average="micro")
        self.average = MeanMetric()

    def forward(self, x: Tensor, y: Any = None) -> Any:
        z = self.net(x)
        if y is not None:
            self.acc(z, y)
            self.log("forward/acc", self.acc, **BOTH)
            self.log("forward/mean", z.mean(), **BOTH)
            self.largest.update(x.max())
        self.updated.update(x.sum())
        return z

    def say(self, batch: Any, stage: str) -> Tensor:
        x, y = batch
        z = self(x, y)
        first, second = self(x), self(2 * x)
        self.between(first, y)
        self.log(f"{stage}/between", self.between, **BOTH)
        self.log(f"{stage}/second", second.square().mean(), **BOTH)
        self.log(f"{stage}/value", self.average(second.mean()), **BOTH)
        return F.cross_entropy(z, y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.say(batch, "train")

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.say(batch, "val")
        self.log("updated", self.updated)
        self.log("largest", self.largest)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.say(batch, "test")


class SaysInForwardByHand(TrainsByHand, SaysInForward):
    """With manual optimisation."""


class Uneven(Classifier):
    """A number of spread calls that is the samples' own, and so differs between processes."""

    def __init__(self) -> None:
        super().__init__()
        self.acc, self.total = MulticlassAccuracy(3, average="micro"), SumMetric()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.net(x)
        self.acc.update(z, y)
        return z

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        for i in range(0, len(x), 2):
            self(x[i : i + 2], y[i : i + 2])
            self.total.update(x[i : i + 2].sum())
        self.log("acc", self.acc, on_step=False, on_epoch=True)
        self.log("total", self.total, on_step=False, on_epoch=True)
        return F.cross_entropy(self(x, y), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.loss(batch)

    test_step = validation_step


def updates() -> Measures:
    return Measures("update")


SOME: list[Callable[[], Any]] = [LogsAll, updates, SaysInForward, Uneven]
OTHERS: list[Callable[[], Any]] = [LogsSometimes, Measures, LogsAllByHand, SaysInForwardByHand]


def all_logs(devices: int, makes: list[Any], samples: int) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        own = {"strategy": dict(FORWARD)} if devices else {}
        return {make.__name__: logs_of(make, devices, samples, **own) for make in makes}


def assert_logs_as_on_one_device(
    makes: list[Any], processes: int, devices: int, samples: int
) -> None:
    several = run_in_processes(all_logs, processes, devices, makes, samples)
    try:
        expected = all_logs(0, makes, samples)
    finally:
        torch.set_default_dtype(torch.float32)
    for own in several:
        torch.testing.assert_close(own, expected, rtol=1e-10, atol=1e-10, equal_nan=True)


@pytest.mark.slow
def test_every_process_logs_what_one_device_logs() -> None:
    """Batches of 25, 25 and one sample, which one process has and the other has not."""
    assert_logs_as_on_one_device(SOME, 2, 4, 51)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "devices", "samples"),
    [(2, 2, 51), (2, 4, 53), (4, 4, 51)],
)
def test_all_of_them(processes: int, devices: int, samples: int) -> None:
    assert_logs_as_on_one_device([*SOME, *OTHERS], processes, devices, samples)


class Collects(Classifier):
    """Keeps what spread calls have seen."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        if self.training:
            self.seen.append(x[:, 0].detach())
        return self.net(x)


class LogsInBackward(Classifier):
    """A checkpoint calls `forward`, which logs, again in the backward."""

    def forward(self, x: Tensor) -> Any:
        self.log("mean", x.mean())
        return self.net(x)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(checkpoint(self, x.requires_grad_(), use_reentrant=True), y)


class JoinsNothing(Classifier):
    """Calls a metric by `forward` in spread calls, with sums."""

    def __init__(self) -> None:
        super().__init__()
        self.total = SumMetric()

    def forward(self, x: Tensor) -> Any:
        self.total(x.sum())
        return self.net(x)


class Computes(Classifier):
    """Computes a metric in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.total = SumMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.total.update(batch[0].sum())
        self.total.compute()
        return self.loss(batch)


def other_outcomes(devices: int) -> dict[str, Any]:
    """What is kept, and what is refused; the refused one comes first in each process alike."""
    torch.set_default_dtype(torch.float64)
    seed_everything(1)
    told: dict[str, Any] = {}
    for make in (Collects, LogsInBackward, JoinsNothing, Computes):
        module = make().double()
        fit = trainer(devices, dict(FORWARD), max_epochs=1)
        try:
            fit.fit(module, data(51))
            told[make.__name__] = [x.clone() for x in getattr(module, "seen", [])]
        except Exception as error:
            told[make.__name__] = f"{type(error).__name__}: {error}"
    return told


def test_what_is_refused_and_what_an_idle_process_keeps() -> None:
    told = run_in_processes(other_outcomes, 2, 4)
    kept = torch.cat([x for own in told for x in own["Collects"]])
    expected = torch.cat([x[:, 0] for x, _ in data(51)])
    torch.testing.assert_close(kept.sort().values, expected.sort().values)
    for own in told:
        assert "a checkpoint calls the module again" in own["LogsInBackward"], own
        assert "self.log('mean')" in own["LogsInBackward"]
        assert "Call it by update in the module's forward" in own["JoinsNothing"]
        assert "compute() of SumMetric to be called after the step" in own["Computes"]
