"""A Trainer with the strategy is copied and pickled where one of a single device is.

People pickle loggers and callbacks that hold the Trainer, and send them to other processes. A copy
has no replicas and no threads: it makes its own in its next fit, which gives one device's numbers.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from support.oracle import Classifier, assert_equal_trees, devices_of, loader, trainer
from torch import nn
from torchmetrics import MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_dp import DataParallelStrategy
from lightning_dp.parallel.apply import current_participant

WAYS: dict[str, Callable[[Any], Any]] = {
    "copied": copy.deepcopy,
    "pickled": lambda value: pickle.loads(pickle.dumps(value)),
}
MOMENTS = ("on_train_start", "on_before_backward", "on_after_backward", "on_train_batch_end")

pytestmark = pytest.mark.filterwarnings("ignore:Found . module.s. in eval mode")

way = pytest.mark.parametrize("way", list(WAYS))


class Copying(Callback):
    """Copies the Trainer and the module at some moments, once at each."""

    def __init__(self, moments: tuple[str, ...], way: str) -> None:
        self.trainers: dict[str, Trainer] = {}
        self.modules: dict[str, LightningModule] = {}
        for moment in moments:
            setattr(self, moment, _Hook(self, moment, way))

    def __getstate__(self) -> dict[str, Any]:
        return {"trainers": {}, "modules": {}}  # copies copy nothing


class _Hook:
    def __init__(self, owner: Copying, moment: str, way: str) -> None:
        self.owner, self.moment, self.way = owner, moment, WAYS[way]

    def __call__(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        if self.moment not in self.owner.trainers:
            self.owner.trainers[self.moment] = self.way(trainer)
            self.owner.modules[self.moment] = self.way(module)


def fitted(job: Trainer, module: LightningModule) -> dict[str, Any]:
    job.fit(module, loader(), loader())
    state = {name: value.cpu() for name, value in module.state_dict().items()}
    return {"state": state, "metrics": dict(job.callback_metrics)}


def copies(
    devices: int, moments: tuple[str, ...], way: str, **strategy: Any
) -> tuple[dict[str, Any], Copying]:
    torch.manual_seed(0)
    callback = Copying(moments, way)
    job = trainer(devices, DataParallelStrategy(**strategy), callbacks=[callback], max_epochs=1)
    return fitted(job, Classifier()), callback


def refit(callback: Copying, moment: str, epochs: int = 2) -> dict[str, Any]:
    """A fit of the copy of the Trainer, of the copy of the module."""
    job = callback.trainers[moment]
    job.fit_loop.max_epochs = epochs
    torch.manual_seed(1)
    return fitted(job, callback.modules[moment])


@way
@pytest.mark.parametrize("mode", ["step", "forward"])
def test_a_copy_has_no_replicas_and_a_fit_of_its_own(mode: str, way: str) -> None:
    torch.set_default_dtype(torch.float64)
    several, callback = copies(3, MOMENTS, way, mode=mode)
    one, of_one = copies(1, MOMENTS, way)
    assert_equal_trees(several, one, "the copied fit", atol=1e-10, rtol=0.0)
    assert set(callback.trainers) == set(MOMENTS)
    for moment, copied in callback.trainers.items():
        assert copied.strategy.measured_steps() == []  # those of a fit's replicas
        assert copied.strategy.parallel_devices == devices_of(3)
        if moment == "on_after_backward":
            found, expected = refit(callback, moment), refit(of_one, moment)
            assert_equal_trees(found, expected, moment, atol=1e-10, rtol=0.0)


class InItsStep(Classifier):
    """Copies itself, its Trainer, its optimizer and its schedule in the middle of a step."""

    kept: ClassVar[dict[str, Any]] = {}

    def __init__(self, way: str, manual: bool, copier: int) -> None:
        super().__init__()
        self.way, self.copier = way, copier
        self.automatic_optimization = not manual
        self.accuracy = MulticlassAccuracy(3)
        self.all = MetricCollection([MeanMetric(), SumMetric()])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not self.automatic_optimization:
            optimizer, schedule = self.optimizers(), self.lr_schedulers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            self.look()
            optimizer.step()
            schedule.step()
        else:
            self.look()
        self.accuracy(self.net(batch[0]).detach(), batch[1])
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.all.update(batch[1].double())
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.log_dict(self.all.compute())
        self.all.reset()

    def look(self) -> None:
        participant = current_participant()
        is_first = participant is None or participant.replica == self.copier
        if is_first and not self.kept:
            optimizer = self.optimizers(use_pl_optimizer=False)
            parts = self, self.trainer, optimizer, self.lr_schedulers()
            names = ("module", "trainer", "optimizer", "schedule")
            self.kept.update(zip(names, map(WAYS[self.way], parts), strict=True))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), self.lr)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


@pytest.mark.usefixtures("on")
@way
@pytest.mark.parametrize("mode, copier", [("step", 2), ("step, by hand", 0), ("forward", 0)])
def test_copies_made_in_a_step_are_as_those_of_one_device(
    mode: str, copier: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_default_dtype(torch.float64)
    results = []
    for devices in (3, 1):
        monkeypatch.setattr(InItsStep, "kept", {})
        torch.manual_seed(0)
        module = InItsStep(way, mode.endswith("hand"), copier)
        strategy = DataParallelStrategy(mode=mode.split(",")[0])
        job = trainer(devices, strategy, max_epochs=1)
        first = fitted(job, module)
        kept = InItsStep.kept
        kept["trainer"].fit_loop.max_epochs = 1
        second = fitted(kept["trainer"], kept["module"])
        options = {k: v for k, v in kept["optimizer"].param_groups[0].items() if k != "params"}
        schedule = kept["schedule"].state_dict()
        results.append([first, second, options, schedule, type(kept["optimizer"]).__name__])
        assert type(kept["optimizer"].param_groups[0]) is dict
    assert_equal_trees(*results, "fits", atol=1e-10, rtol=0.0)


class Normed(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(16))


@way
def test_layers_that_were_copied_while_they_were_synced_are_synced_again(way: str) -> None:
    torch.set_default_dtype(torch.float64)
    results = []
    for devices in (3, 1):
        callback = Copying(("on_train_batch_end",), way)
        options = {"max_epochs": 1, "sync_batchnorm": devices > 1, "callbacks": [callback]}
        torch.manual_seed(0)
        first = fitted(trainer(devices, DataParallelStrategy(), **options), Normed())
        results.append([first, refit(callback, "on_train_batch_end")])
    assert_equal_trees(*results, "fits", atol=1e-8, rtol=0.0)
