"""With split="memory" the root, which is fuller, gets fewer samples, and all peaks are alike."""

from typing import Any

import pytest
import sim_devices
import torch
from lightning.pytorch import LightningModule, Trainer
from support.processes import in_another_process
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_dp import DataParallelMonitor, DataParallelStrategy


class Denoiser(LightningModule):
    """Its outputs are as large as its inputs; Adam's state lies on the root."""

    def __init__(self) -> None:
        super().__init__()
        wide = nn.Conv2d(64, 64, 3, padding=1)
        self.net = nn.Sequential(
            nn.Conv2d(1, 64, 3, padding=1), nn.GELU(), wide, nn.GELU(), nn.Conv2d(64, 1, 1)
        )
        self.plain = nn.Linear(768, 768)

    def training_step(self, images: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = (self.net(images) - images).square().mean() + self.plain.weight.mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


def balance(split: str) -> tuple[Any, float]:
    """The sizes of the last step, and the fullest device's peak over the mean."""
    sim_devices.enable(4)
    monitor = DataParallelMonitor()
    trainer = Trainer(
        accelerator="sim",
        devices=4,
        strategy=DataParallelStrategy(split=split, check_first_step=False),
        callbacks=[monitor],
        max_steps=6,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Denoiser(), DataLoader(torch.rand(192, 1, 32, 32), batch_size=32))
    last = monitor.periods[-1]
    return last.samples, last.imbalance(last.peak_bytes)


@pytest.mark.sim_only("It is about the memory of devices that nothing else uses.")
def test_memory_is_balanced() -> None:
    even, balanced = (in_another_process(balance, split) for split in ("even", "memory"))
    assert even[0] == (8, 8, 8, 8) and balanced[0][0] < 8
    assert even[1] >= 1.1 and balanced[1] <= 1.05
