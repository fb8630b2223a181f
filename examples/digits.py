"""A convolutional recurrent net on scikit-learn's digits: 1,797 real images of 8 x 8 pixels.

python examples/digits.py --devices 4 --epochs 30
python -m lightning_dp experiment=digits trainer.devices=4 trainer.max_epochs=30

Nothing in the model or the data knows about several devices.
"""

import argparse
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import lightning as L
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import lightning_dp  # noqa: F401  # registers the strategy "dp_custom"

Batch = tuple[Tensor, Tensor]
OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]
SchedulerFactory = Callable[[Optimizer], LRScheduler]

SIDE = 8  # pixels
CLASSES = 10
VAL_IMAGES = 177
TEST_IMAGES = 180
ADAMW = partial(AdamW, lr=4e-3)


def conv_block(channels_in: int, channels_out: int) -> nn.Sequential:
    """A 3 x 3 convolution, normed within each image: no other image of a batch matters."""
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False),
        nn.GroupNorm(math.gcd(4, channels_out), channels_out),
        nn.ReLU(),
    )


class DigitsCRNN(L.LightningModule):
    """Classifies images of shape [N, 1, 8, 8] with pixels in [0, 1]; returns logits [N, 10].

    Two convolutions look for strokes. Two layers of GRUs read the columns of what they find, from
    left to right and back, as nets for lines of text do. Each column is a small operation that has
    to wait for the one before: one device's threads cannot share it, but replicas can.

    Args:
        width: channels of the convolutions.
        hidden: features of a GRU, in each direction.
        smoothing: the part of a training label that all ten classes share, from 0 to 1.
        optimizer: makes the optimizer from the parameters; by default AdamW.
        scheduler: makes a per-epoch learning rate schedule from the optimizer; by default none.
    """

    def __init__(
        self,
        width: int = 16,
        hidden: int = 128,
        smoothing: float = 0.1,
        optimizer: OptimizerFactory = ADAMW,
        scheduler: SchedulerFactory | None = None,
    ) -> None:
        super().__init__()
        # Only plain values go into the checkpoint, so that it loads with weights_only=True.
        self.save_hyperparameters("width", "hidden", "smoothing")
        self.make_optimizer = optimizer
        self.make_scheduler = scheduler
        self.strokes = nn.Sequential(
            conv_block(1, width), conv_block(width, width), nn.MaxPool2d((2, 1))
        )
        rows = SIDE // 2
        self.columns = nn.GRU(width * rows, hidden, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(SIDE * 2 * hidden, CLASSES)
        self.smooth_loss = nn.CrossEntropyLoss(label_smoothing=smoothing)
        self.loss = nn.CrossEntropyLoss()
        self.train_acc = MulticlassAccuracy(CLASSES, average="micro")
        self.val_acc = MulticlassAccuracy(CLASSES, average="micro")
        self.test_acc = MulticlassAccuracy(CLASSES, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        strokes = self.strokes(images).flatten(1, 2)  # [N, width * rows, columns]
        columns, _ = self.columns(strokes.mT)
        logits: Tensor = self.head(columns.flatten(1))
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels = batch
        logits = self(images)
        loss: Tensor = self.smooth_loss(logits, labels)
        self.train_acc(logits, labels)
        # sync_dist: the mean over all processes, where a strategy starts several.
        self.log("train/loss", loss, on_step=False, on_epoch=True, prog_bar=True, sync_dist=True)
        self.log("train/acc", self.train_acc, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        loss, logits, labels = self._score(batch)
        self.val_acc(logits, labels)
        self.log("val/loss", loss, sync_dist=True)
        self.log("val/acc", self.val_acc, prog_bar=True)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        loss, logits, labels = self._score(batch)
        self.test_acc(logits, labels)
        self.log("test/loss", loss, sync_dist=True)
        self.log("test/acc", self.test_acc)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        logits: Tensor = self(batch[0])
        return logits.argmax(dim=1)

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        if self.make_scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.make_scheduler(optimizer)}

    def _score(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        images, labels = batch
        logits = self(images)
        return self.loss(logits, labels), logits, labels


class DigitsDataModule(L.LightningDataModule):
    """1,440 training, 177 validation and 180 test images, with the same share of each digit.

    Args:
        batch_size: samples per optimizer step, over all devices, and over all processes where a
            strategy starts several.
        num_workers: processes that load data; 0 is the main process.
        split_seed: seed of the split, apart from the seed of training.
    """

    def __init__(self, batch_size: int = 240, num_workers: int = 0, split_seed: int = 0) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.split_seed = split_seed

    def setup(self, stage: str) -> None:
        pixels, labels = load_digits(return_X_y=True)
        split = partial(train_test_split, random_state=self.split_seed)
        rest, test = split(range(len(labels)), test_size=TEST_IMAGES, stratify=labels)
        train, val = split(rest, test_size=VAL_IMAGES, stratify=labels[rest])
        self.images = torch.as_tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
        self.labels = torch.as_tensor(labels)
        self.train, self.val, self.test = map(self._subset, (train, val, test))

    def train_dataloader(self) -> DataLoader[Batch]:
        return self._loader(self.train, shuffle=True)

    def val_dataloader(self) -> DataLoader[Batch]:
        return self._loader(self.val)

    def test_dataloader(self) -> DataLoader[Batch]:
        return self._loader(self.test)

    def predict_dataloader(self) -> DataLoader[Batch]:
        return self._loader(self.test)

    def _subset(self, indices: Sequence[int]) -> TensorDataset:
        return TensorDataset(self.images[indices], self.labels[indices])

    def _loader(self, dataset: Dataset[Any], shuffle: bool = False) -> DataLoader[Batch]:
        processes = self.trainer.world_size if self.trainer else 1
        return DataLoader(
            dataset,
            batch_size=max(1, self.batch_size // processes),
            num_workers=self.num_workers,
            shuffle=shuffle,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Digits on several devices")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=30)
    args = parser.parse_args()
    L.seed_everything(42)
    model = DigitsCRNN(scheduler=partial(CosineAnnealingLR, T_max=args.epochs))
    data = DigitsDataModule()
    trainer = L.Trainer(
        strategy="dp_custom",
        accelerator=args.accelerator,
        devices=args.devices,
        max_epochs=args.epochs,
        log_every_n_steps=6,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(model, data)
    print(f"train/loss {trainer.callback_metrics['train/loss']:.4f}")
    trainer.test(model, data)


if __name__ == "__main__":
    main()
