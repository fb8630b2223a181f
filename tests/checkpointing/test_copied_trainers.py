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

from lightning_dp import DataParallelStrategy

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


class Copied(Classifier):
    """Copies itself and its Trainer once, in the middle of a fit."""

    way = ""

    def on_train_batch_end(self, *_: Any) -> None:
        if not KEPT:
            KEPT.extend(map(WAYS[self.way], (self.trainer, self)))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", ["step", "forward"])
def test_a_copy_has_no_replicas_and_a_fit_of_its_own(mode: Any, way: str) -> None:
    torch.set_default_dtype(torch.float64)
    results = []
    for devices in (3, 1):
        KEPT.clear()
        torch.manual_seed(0)
        job: Any = trainer(devices, DataParallelStrategy(mode=mode), max_epochs=1)
        module: Any = Copied()
        module.way = way
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
