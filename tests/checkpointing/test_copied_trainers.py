"""A Trainer with the strategy is copied and pickled where one of a single device is.

People pickle loggers and callbacks that hold the Trainer, and send them to other processes. A copy
has no replicas and no threads: it makes its own in its next fit, which gives one device's numbers.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from support.oracle import Classifier, assert_equal_trees, devices_of, loader, trainer
from torchmetrics.classification import MulticlassAccuracy

from lightning_dp import DataParallelStrategy
from lightning_dp.parallel.apply import current_participant

WAYS: dict[str, Callable[[Any], Any]] = {
    "copied": copy.deepcopy,
    "pickled": lambda value: pickle.loads(pickle.dumps(value)),
}
KEPT: dict[str, tuple[Trainer, LightningModule]] = {}
"""Copies, by the moment at which they were made: the first one of each."""

pytestmark = [
    pytest.mark.usefixtures("on"),
    pytest.mark.filterwarnings("ignore:Found . module.s. in eval mode"),
]


def keep(moment: str, way: str, job: Trainer, module: LightningModule) -> None:
    if moment not in KEPT:
        KEPT[moment] = (WAYS[way](job), WAYS[way](module))


class Copying(Callback):
    """Copies the Trainer and the module after a step."""

    def __init__(self, way: str) -> None:
        self.way = way

    def on_train_batch_end(self, *args: Any) -> None:
        keep("batch end", self.way, *args[:2])


class InItsStep(Classifier):
    """Copies itself and its Trainer in the middle of a step, in the last replica."""

    def __init__(self, way: str, *, by_hand: bool) -> None:
        super().__init__()
        self.way, self.automatic_optimization = way, not by_hand
        self.accuracy = MulticlassAccuracy(3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        participant = current_participant()
        if participant is None or participant.replica == 2:
            keep("step", self.way, self.trainer, self)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        self.accuracy(self.net(batch[0]).detach(), batch[1])
        # A copy has Lightning's table of its metrics, by the ids of the first module's.
        self.log("accuracy", self.accuracy, on_epoch=True, metric_attribute="accuracy")
        return loss


def fitted(job: Trainer, module: LightningModule) -> dict[str, Any]:
    job.fit(module, loader(), loader())
    state = {name: value.cpu() for name, value in module.state_dict().items()}
    return {"state": state, "metrics": dict(job.callback_metrics)}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", ["step", "step, by hand", "forward"])
def test_a_copy_has_no_replicas_and_a_fit_of_its_own(mode: str, way: str) -> None:
    torch.set_default_dtype(torch.float64)
    results = []
    for devices in (3, 1):
        KEPT.clear()
        torch.manual_seed(0)
        strategy = DataParallelStrategy(mode=mode.split(",")[0])
        options = {"max_epochs": 1, "callbacks": [Copying(way)]}
        module = InItsStep(way, by_hand=mode.endswith("hand"))
        fits = {"first": fitted(trainer(devices, strategy, **options), module)}
        for moment, (job, copied) in [*KEPT.items()]:
            assert job.strategy.measured_steps() == []  # those of a fit's replicas
            assert devices == 1 or job.strategy.parallel_devices == devices_of(devices)
            job.fit_loop.max_epochs = 2
            torch.manual_seed(1)
            fits[moment] = fitted(job, copied)
        results.append(fits)
    KEPT.clear()
    assert results[0].keys() == {"first", "step", "batch end"}
    assert_equal_trees(*results, "fits", atol=1e-10, rtol=0.0)
