"""An app that knows nothing of lightning_dp, in the manner of lightning-hydra-template."""

from typing import Any

import hydra
import lightning as L
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.utils.data import DataLoader


class Linear(LightningModule):
    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.net = nn.Linear(3, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch).square().mean()
        self.log("train/loss", loss)
        return loss

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test/loss", self.net(batch).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class RandomData(LightningDataModule):
    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> Any:
        rows: Any = torch.randn(4 * self.batch_size, 3, generator=torch.Generator().manual_seed(0))
        return DataLoader(rows, batch_size=self.batch_size)

    def test_dataloader(self) -> Any:
        return self.train_dataloader()


def listed(group: DictConfig | None) -> list[Any]:
    return [hydra.utils.instantiate(entry) for entry in (group or {}).values()]


def train(cfg: DictConfig) -> L.Trainer:
    """What the template's train.py does: nobody passes a strategy to the Trainer."""
    L.seed_everything(cfg.seed, workers=True, verbose=False)
    data = hydra.utils.instantiate(cfg.data)
    model = hydra.utils.instantiate(cfg.model)
    callbacks, logger = listed(cfg.get("callbacks")), listed(cfg.get("logger"))
    trainer: L.Trainer = hydra.utils.instantiate(cfg.trainer, callbacks=callbacks, logger=logger)
    if cfg.get("train"):
        trainer.fit(model=model, datamodule=data, ckpt_path=cfg.get("ckpt_path"))
    if cfg.get("test"):
        trainer.test(model=model, datamodule=data, verbose=False)
    return trainer
