"""A loss over the whole batch: forward mode has one device's loss curve, and step mode has not."""

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from support.oracle import trainer
from torch import nn

from lightning_dp import DataParallelStrategy
from lightning_dp.examples.contrastive import ContrastiveModel, DigitPairs, nt_xent

EPOCHS = 2
BATCH = 201  # of 402 views, which 4 devices share out as 101, 101, 100, 100; the last is of 33


class Losses(Callback):
    def __init__(self) -> None:
        self.of_steps: list[float] = []

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *_: Any
    ) -> None:
        self.of_steps.append(float(outputs["loss"]))


def losses(devices: int, mode: str = "forward") -> list[float]:
    L.seed_everything(42, verbose=False)
    record = Losses()
    job = trainer(devices, DataParallelStrategy(mode=mode), max_epochs=EPOCHS, callbacks=[record])
    job.fit(ContrastiveModel(width=8), DigitPairs(batch_size=BATCH))
    return record.of_steps


@pytest.fixture(scope="module")
def one_device() -> list[float]:
    return losses(1)


def test_forward_mode_has_the_loss_curve_of_one_device(on: str, one_device: list[float]) -> None:
    four = losses(4)
    assert len(four) == EPOCHS * 8
    assert four[-2] < four[0] - 0.2, "nothing was learned"
    assert four == pytest.approx(one_device, abs=1e-5, rel=0)


def test_step_mode_has_another_one_since_the_loss_sees_its_shard(
    on: str, one_device: list[float]
) -> None:
    with pytest.warns(UserWarning, match="The loss is not a mean over samples"):
        four = losses(4, mode="step")
    # Of a quarter of the batch, hence a quarter of the views to tell apart: about log(4) less.
    assert all(b - a > 1 for a, b in zip(four, one_device, strict=True))


def test_nt_xent_is_the_mean_of_the_partners_negative_log_probability() -> None:
    views = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    similar = nn.functional.cosine_similarity(views[:, None], views[None], dim=2) / 0.5
    expected = torch.zeros((), dtype=torch.float64)
    for i in range(6):
        others = [j for j in range(6) if j != i]
        expected -= (similar[i, (i + 3) % 6] - similar[i, others].logsumexp(0)) / 6
    torch.testing.assert_close(nt_xent(views, 0.5), expected)
