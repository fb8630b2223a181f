"""The data."""

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset


class Data(L.LightningDataModule):
    """Random rows, and sums of their squares to be learned. Put your own data here.

    Args:
        features: numbers in a row.
        rows: how many rows there are; a fifth each for validation and test.
        batch_size: rows per batch, over all devices.
    """

    def __init__(self, features: int = 8, rows: int = 1000, batch_size: int = 50) -> None:
        super().__init__()
        inputs = torch.randn(rows, features, generator=torch.Generator().manual_seed(0))
        targets = inputs.square().sum(1)
        fifth = rows // 5
        cuts = slice(2 * fifth, None), slice(fifth), slice(fifth, 2 * fifth)
        self.train, self.val, self.test = [TensorDataset(inputs[c], targets[c]) for c in cuts]
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[tuple[torch.Tensor, ...]]:
        """In another order every epoch."""
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[torch.Tensor, ...]]:
        """After every epoch."""
        return DataLoader(self.val, self.batch_size)

    def test_dataloader(self) -> DataLoader[tuple[torch.Tensor, ...]]:
        """At the end."""
        return DataLoader(self.test, self.batch_size)
