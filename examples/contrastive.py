"""SimCLR on scikit-learn's digits: a loss over the whole batch, in forward mode.

python examples/contrastive.py --devices 4 --epochs 20
python examples/contrastive.py --devices 1 --epochs 20     # prints the same losses
python -m lightning_dp experiment=contrastive trainer.devices=4

Two views of one image should be alike, and unlike all other views in the batch. A replica that sees
a part of the batch has fewer others to tell apart, which is another loss. In forward mode
`training_step` runs once, with the whole batch, and only `self(views)` is spread over the devices.
"""

import argparse
import math

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import DataParallelStrategy


def nt_xent(embeddings: Tensor, temperature: float) -> Tensor:
    """SimCLR's loss, 0-dim, of embeddings [2N, D] whose rows i and N + i are of one image."""
    unit = F.normalize(embeddings, dim=1)
    itself = torch.eye(len(unit), dtype=torch.bool, device=unit.device)
    partner = torch.arange(len(unit), device=unit.device).roll(len(unit) // 2)
    return F.cross_entropy((unit @ unit.T / temperature).masked_fill(itself, -math.inf), partner)


def random_view(images: Tensor) -> Tensor:
    """Turns, scales, slants and shifts each image a little, and adds noise."""
    turn, scale, slant, x, y = (torch.rand(5, len(images), 1) * 2 - 1) * torch.tensor(
        [0.4, 0.2, 0.4, 0.2, 0.2]
    ).view(5, 1, 1)
    cos, sin = turn.cos() * (1 + scale), turn.sin() * (1 + scale)
    maps = torch.stack([cos, slant - sin, x, sin, cos, y], dim=1).view(-1, 2, 3).to(images)
    grid = F.affine_grid(maps, list(images.shape), align_corners=False)
    noise = torch.randn(images.shape).to(images)
    return F.grid_sample(images, grid, align_corners=False) + 0.15 * noise


class SimCLR(L.LightningModule):
    """Learns embeddings [N, 64] of images [N, 1, 8, 8] without labels.

    The test gives each image the label of the nearest of 100 labelled ones (`test/acc`).

    Args:
        width: channels of the first convolution.
        temperature: the smaller, the more the loss looks at the most similar views.
        lr: learning rate of AdamW.
    """

    def __init__(self, width: int = 32, temperature: float = 0.5, lr: float = 2e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        # Neither batch norm nor dropout: forward sees a part of the batch.
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.GroupNorm(1, width),
            nn.GELU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.GroupNorm(1, 2 * width),
            nn.GELU(),
            nn.Flatten(),
            nn.Linear(2 * width * 16, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, 64),
        )

    def forward(self, images: Tensor) -> Tensor:
        embeddings: Tensor = self.net(images)
        return embeddings

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (images,) = batch
        views = torch.cat([random_view(images), random_view(images)])
        loss = nt_xent(self(views), self.hparams["temperature"])
        self.log("train/loss", loss, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def on_test_epoch_start(self) -> None:
        self.seen: list[tuple[Tensor, Tensor]] = []

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.seen.append((F.normalize(self(images), dim=1), labels))

    def on_test_epoch_end(self) -> None:
        embeddings, labels = map(torch.cat, zip(*self.seen, strict=True))
        nearest = (embeddings[100:] @ embeddings[:100].T).argmax(dim=1)
        self.log("test/acc", (labels[:100][nearest] == labels[100:]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])


class Digits(L.LightningDataModule):
    """1,440 images for training, without labels, and 357 with labels for the test.

    Args:
        batch_size: images per optimizer step, over all devices.
    """

    def __init__(self, batch_size: int = 240) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        pixels, labels = load_digits(return_X_y=True)
        images = torch.as_tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
        self.train = TensorDataset(images[:1440])
        self.test = TensorDataset(images[1440:], torch.as_tensor(labels[1440:]))

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def test_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.test, batch_size=self.batch_size)


def main() -> None:
    parser = argparse.ArgumentParser(description="SimCLR on several devices")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=20)
    args = parser.parse_args()
    L.seed_everything(42)
    trainer = L.Trainer(
        strategy=DataParallelStrategy(mode="forward"),
        accelerator=args.accelerator,
        devices=args.devices,
        max_epochs=args.epochs,
        log_every_n_steps=6,
        logger=False,
        enable_checkpointing=False,
    )
    model, data = SimCLR(), Digits()
    trainer.fit(model, data)
    print(f"train/loss {trainer.callback_metrics['train/loss']:.4f}")
    trainer.test(model, data)


if __name__ == "__main__":
    main()
