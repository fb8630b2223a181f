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
from support.oracle import Classifier, assert_equal_trees, devices_of, loader, trainer
from torchmetrics.classification import MulticlassAccuracy

from lightning_dp import DataParallelStrategy
from lightning_dp.parallel.apply import current_participant

WAYS: dict[str, Callable[[Any], Any]] = {
    "copied": copy.deepcopy,
    "pickled": lambda value: pickle.loads(pickle.dumps(value)),
}
KEPT: list[Any] = []
"""Copies of the Trainer and of the module."""

pytestmark = [
    pytest.mark.usefixtures("on"),
    pytest.mark.filterwarnings("ignore:Found . module.s. in eval mode"),
]


class InItsStep(Classifier):
    """Copies itself and its Trainer once, in the middle of a step, in the last replica."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.accuracy = way, MulticlassAccuracy(3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        participant = current_participant()
        if not KEPT and (participant is None or participant.replica == 2):
            KEPT.extend(map(WAYS[self.way], (self.trainer, self)))
        self.accuracy(self.net(batch[0]).detach(), batch[1])
        # A copy has Lightning's table of its metrics, by the ids of the first module's.
        self.log("accuracy", self.accuracy, on_epoch=True, metric_attribute="accuracy")
        return loss


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", ["step", "forward"])
def test_a_copy_has_no_replicas_and_a_fit_of_its_own(mode: Any, way: str) -> None:
    torch.set_default_dtype(torch.float64)
    results = []
    for devices in (3, 1):
        KEPT.clear()
        torch.manual_seed(0)
        job: Any = trainer(devices, DataParallelStrategy(mode=mode), max_epochs=1)
        module: Any = InItsStep(way)
        job.fit(module, loader(), loader())
        first = dict(module.state_dict()), dict(job.callback_metrics)
        job, module = KEPT
        assert job.strategy.measured_steps() == []  # those of a fit's replicas
        assert devices == 1 or job.strategy.parallel_devices == devices_of(devices)
        job.fit_loop.max_epochs = 2
        job.fit(module, loader(), loader())
        second = dict(module.state_dict()), dict(job.callback_metrics)
        results.append((first, second))
    KEPT.clear()
    assert_equal_trees(*results, "fits", atol=1e-10, rtol=0.0)
