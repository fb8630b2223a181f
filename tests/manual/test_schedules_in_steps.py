"""Schedules that training steps advance themselves, without optimising by hand: once for all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import Classifier, assert_same, run
from torch.optim import lr_scheduler

pytestmark = pytest.mark.usefixtures("on", "one_thread")


class OnSelf(Classifier):
    """Has a schedule that the trainer does not know, and reads the rate that it gives."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.05)
        self.schedule = self.make(optimizer)
        return optimizer

    def make(self, optimizer: Any) -> Any:
        return lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    def advance(self, loss: Any) -> None:
        self.schedule.step()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.advance(loss)
        self.log("rate", self.schedule.get_last_lr()[0])
        return loss


class Cycle(OnSelf):
    def make(self, optimizer: Any) -> Any:
        return lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=12)


class Plateau(OnSelf):
    """Takes the loss of the batch, not that of a shard."""

    def make(self, optimizer: Any) -> Any:
        return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)

    def advance(self, loss: Any) -> None:
        self.schedule.step(loss.detach())


class OfTheTrainer(OnSelf):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        config = {"scheduler": self.schedule, "interval": "step", "frequency": 1000}
        return {"optimizer": optimizer, "lr_scheduler": config}

    def advance(self, loss: Any) -> None:
        schedule: Any = self.lr_schedulers()
        schedule.step()


@pytest.mark.parametrize("executor", ["threads", "inorder"])
@pytest.mark.parametrize("make", [OnSelf, Cycle, Plateau, OfTheTrainer])
def test_a_schedule_is_advanced_once_in_a_step(make: Any, executor: str) -> None:
    torch.set_default_dtype(torch.float64)
    several = run(make, 3, strategy={"executor": executor})
    assert_same(several, run(make, 1))
    assert several.module.schedule.last_epoch == 6
    assert type(several.module.schedule) is type(make().make(several.module.optimizers().optimizer))
