"""A long run leaves no growing memory, threads or replicas."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from support import oracle
from support.oracle import Classifier, loader
from torch import Tensor, nn

from lightning_dp import DataParallelStrategy
from lightning_dp.parallel.devices import allocated_memory

pytestmark = [pytest.mark.usefixtures("on", "one_thread"), pytest.mark.slow]

STEPS = 1_000
PER_EPOCH = 25
SLACK = {"objects": 200}
"""Lightning keeps a little of every epoch."""


class Busy(Classifier):
    """Logs, measures, collects and binds, as real modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(10)
        self.outputs: list[Tensor] = []
        self.mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.mask = torch.ones_like(x[0])
        return self.net(self.norm(x) * self.mask)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.loss(batch))
        self.outputs.append(batch[0])

    def on_validation_epoch_end(self) -> None:
        self.outputs.clear()


class Count(Callback):
    """At the end of every epoch: what is there, and bytes where they are counted."""

    def __init__(self) -> None:
        self.counts: list[dict[str, int]] = []

    def on_train_epoch_end(self, job: Any, module: Any) -> None:
        gc.collect()
        objects = gc.get_objects()
        self.counts.append(
            {
                "tensors": sum(issubclass(type(o), Tensor) for o in objects),
                "modules": sum(issubclass(type(o), nn.Module) for o in objects),
                "objects": len(objects),
                "threads": threading.active_count(),
                **{str(device): allocated_memory(device) for device in oracle.devices_of(3)},
            }
        )

    def check_flat(self) -> None:
        """Holds the last counts to early ones."""
        early, late = self.counts[5], self.counts[-1]
        for name, number in late.items():
            assert number <= early[name] + SLACK.get(name, 0), (name, early, late)


@pytest.mark.parametrize("mode", ["step", "forward"])
def test_1000_steps_of_fit_and_validate_leave_nothing_behind(mode: str) -> None:
    count = Count()
    strategy = DataParallelStrategy(mode=mode, executor="threads")
    options = {"callbacks": [count], "max_epochs": STEPS // PER_EPOCH}
    job = oracle.trainer(3, strategy, **options)
    train, val = loader(n=PER_EPOCH * 6, batch_size=6), loader(n=20, batch_size=10)
    before = threading.active_count()
    job.fit(Busy(), train, val)
    assert job.global_step == STEPS
    count.check_flat()
    assert threading.active_count() == before


@pytest.mark.parametrize("mode", ["step", "forward"])
def test_many_runs_of_one_trainer_leave_nothing_behind(mode: str) -> None:
    count = Count()
    job = oracle.trainer(3, DataParallelStrategy(mode=mode), callbacks=[count], max_epochs=1)
    module, data = Busy(), loader(n=24, batch_size=6)
    for turn in range(20):
        job.fit_loop.max_epochs = turn + 1
        job.fit(module, data, data)
        job.validate(module, data, verbose=False)
        job.predict(module, data)
    count.check_flat()
