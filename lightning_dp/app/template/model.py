"""The model."""

import lightning as L
import torch
from torch import Tensor, nn

Rows = tuple[Tensor, Tensor]


class Model(L.LightningModule):
    """A small network that predicts one number per row.

    Args:
        features: numbers in a row.
        width: numbers in the hidden layer.
        lr: learning rate.
    """

    def __init__(self, features: int = 8, width: int = 32, lr: float = 0.01) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, 1))
        self.lr = lr

    def training_step(self, batch: Rows, batch_idx: int) -> Tensor:
        """The loss: a mean over the samples of the batch."""
        return self._loss(batch, "train")

    def validation_step(self, batch: Rows, batch_idx: int) -> None:
        """Logs what the checkpoint and early stopping look at."""
        self._loss(batch, "val")

    def test_step(self, batch: Rows, batch_idx: int) -> None:
        """Logs the same of the test's rows."""
        self._loss(batch, "test")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """One optimizer for everything."""
        return torch.optim.AdamW(self.parameters(), lr=self.lr)

    def _loss(self, batch: Rows, stage: str) -> Tensor:
        rows, targets = batch
        loss = nn.functional.mse_loss(self.net(rows).squeeze(1), targets)
        self.log(f"{stage}/loss", loss, prog_bar=True, on_epoch=True, on_step=False)
        return loss
