"""A loss over the whole batch: SimCLR on scikit-learn's digits, without their labels.

python examples/contrastive.py --devices 4 --epochs 40
python examples/contrastive.py --compare --epochs 5
python -m lightning_dp experiment=contrastive trainer.devices=4

Two views of an image should be alike, and unlike all other views in the batch. A device that sees
a part of the batch has fewer others to tell apart, which is another loss. In forward mode
`training_step` has the whole batch, and only `self(views)` is spread over the devices.
`--compare` shows the difference.
"""

import logging
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import DataParallelStrategy
from lightning_dp.app.options import check_at_least
from lightning_dp.app.quiet import quiet
from lightning_dp.app.scripts import ScriptParser, train_and_test

Mode = Literal["step", "forward"]
Views = tuple[Tensor, Tensor]
OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]

CLASSES = 10
TEST_IMAGES = 357

ADAMW = partial(AdamW, lr=2e-3)
WHY = (
    "why forward mode: the loss compares each view with all others of the batch; on a part of the "
    "batch it is another number (see: python examples/contrastive.py --compare --epochs 5)"
)


def conv_block(channels_in: int, channels_out: int, stride: int = 1) -> nn.Sequential:
    """A 3 x 3 convolution, normalised over each image."""
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, stride, padding=1),
        nn.GroupNorm(1, channels_out),
        nn.GELU(),
    )


def nt_xent(embeddings: Tensor, temperature: float) -> Tensor:
    """SimCLR's loss, 0-dim, of embeddings [2N, D] whose rows i and N + i are of one image."""
    unit = F.normalize(embeddings, dim=1)
    similarity = unit @ unit.T / temperature
    itself = torch.eye(len(unit), dtype=torch.bool, device=unit.device)
    partner = torch.arange(len(unit), device=unit.device).roll(len(unit) // 2)
    return F.cross_entropy(similarity.masked_fill(itself, -math.inf), partner)


def nearest_label(queries: Tensor, points: Tensor, labels: Tensor) -> Tensor:
    """The label of the point with the most similar direction, for each query."""
    queries, points = F.normalize(queries, dim=1), F.normalize(points, dim=1)
    return labels[(queries @ points.T).argmax(dim=1)]


class ContrastiveModel(L.LightningModule):
    """Learns embeddings [N, 64] of images [N, 1, 8, 8] from pairs of views.

    Testing asks how far a few labelled images go: each test image gets the label of the nearest
    one, by embeddings (`test/acc`) and, to compare, by pixels (`test/acc_pixels`).

    Args:
        width: channels of the first convolution.
        temperature: the smaller, the more the loss looks at the most similar views.
        optimizer: makes the optimizer from the parameters; by default AdamW.
    """

    def __init__(
        self, width: int = 32, temperature: float = 0.5, optimizer: OptimizerFactory = ADAMW
    ) -> None:
        super().__init__()
        check_at_least("width", width, 1)
        self.save_hyperparameters("width", "temperature")
        self.temperature = temperature
        self.make_optimizer = optimizer
        # No batch norm and no dropout: forward runs on parts of the batch, so batch norm would
        # normalise by a part's statistics, and dropout would draw per part. Group norm normalises
        # each image by itself. GELU, since ReLU's gradient jumps: there, differences of rounding
        # alone grow from 1e-7 to 1e-2 within ten steps, on one device too.
        encoder = nn.Sequential(
            conv_block(1, width),
            conv_block(width, 2 * width, stride=2),
            conv_block(2 * width, 2 * width, stride=2),
            nn.Flatten(),
            nn.Linear(2 * width * 2 * 2, 4 * width),
        )
        projection = nn.Sequential(
            nn.GELU(), nn.Linear(4 * width, 4 * width), nn.GELU(), nn.Linear(4 * width, 64)
        )
        self.net = nn.Sequential(encoder, projection)

    def forward(self, images: Tensor) -> Tensor:
        embeddings: Tensor = self.net(images)
        return embeddings

    def training_step(self, views: Views, batch_idx: int) -> Tensor:
        loss = nt_xent(self(torch.cat(views)), self.temperature)
        self.log("train/loss", loss, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def on_test_epoch_start(self) -> None:
        self.seen: list[list[tuple[Tensor, Tensor, Tensor]]] = [[], []]

    def test_step(self, batch: Views, batch_idx: int, dataloader_idx: int = 0) -> None:
        images, labels = batch
        self.seen[dataloader_idx].append((self(images), images.flatten(1), labels))

    def on_test_epoch_end(self) -> None:
        labelled, test = (list(map(torch.cat, zip(*seen, strict=True))) for seen in self.seen)
        for name, kind in (("test/acc", 0), ("test/acc_pixels", 1)):
            found = nearest_label(test[kind], labelled[kind], labelled[2])
            self.log(name, (found == test[2]).float().mean())

    def configure_optimizers(self) -> Optimizer:
        optimizer: Optimizer = self.make_optimizer(self.parameters())
        return optimizer


class DigitPairs(L.LightningDataModule):
    """Two random views of each of 1,440 images; for testing, a few labelled images and 357 others.

    Args:
        batch_size: images per optimizer step, over all devices.
        labelled: images of each digit whose label is known in the test.
        seed: of order and views. A view depends on it, the epoch and the image, and on nothing
            else: any number of devices sees the same data.
    """

    def __init__(self, batch_size: int = 240, labelled: int = 10, seed: int = 0) -> None:
        super().__init__()
        check_at_least("batch_size", batch_size, 1)
        check_at_least("labelled", labelled, 1)
        self.batch_size = batch_size
        self.labelled = labelled
        self.seed = seed

    def setup(self, stage: str) -> None:
        pixels, digits = load_digits(return_X_y=True)
        train, test = train_test_split(
            range(len(digits)), test_size=TEST_IMAGES, stratify=digits, random_state=0
        )
        images = torch.as_tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
        labels = torch.as_tensor(digits)
        self.images = images[train]
        of_digit = ([i for i in train if digits[i] == digit] for digit in range(CLASSES))
        few = [i for indices in of_digit for i in indices[: self.labelled]]
        self.few = TensorDataset(images[few], labels[few])
        self.test = TensorDataset(images[test], labels[test])

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(
            range(len(self.images)),  # type: ignore[arg-type]  # anything with a length will do
            batch_size=self.batch_size,
            shuffle=True,
            generator=torch.Generator().manual_seed(self.seed),
            collate_fn=self._two_views,
        )

    def test_dataloader(self) -> list[DataLoader[Any]]:
        return [DataLoader(data, batch_size=self.batch_size) for data in (self.few, self.test)]

    def _two_views(self, indices: list[int]) -> Views:
        epoch = self.trainer.current_epoch if self.trainer else 0
        draws = [_draw(self.seed, epoch, index) for index in indices]
        positions, noise = map(torch.stack, zip(*draws, strict=True))
        images = self.images[indices]
        first, second = (_view(images, positions[:, i], noise[:, i]) for i in range(2))
        return first, second


def _draw(seed: int, epoch: int, index: int) -> tuple[Tensor, Tensor]:
    """Random numbers for the two views of one image: positions [2, 5] in -1 to 1, and noise."""
    generator = torch.Generator().manual_seed((seed << 40) + (epoch << 20) + index)
    positions = torch.rand(2, 5, generator=generator) * 2 - 1
    return positions, torch.randn(2, 1, 8, 8, generator=generator)


def _view(images: Tensor, positions: Tensor, noise: Tensor) -> Tensor:
    """Turns, scales, slants and shifts each image a little, and adds noise."""
    turn, scale, slant, x, y = (positions * torch.tensor([0.4, 0.2, 0.4, 0.2, 0.2])).T
    cos, sin = turn.cos() * (1 + scale), turn.sin() * (1 + scale)
    maps = torch.stack([cos, slant - sin, x, sin, cos, y], dim=1).view(-1, 2, 3)
    grid = F.affine_grid(maps, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False) + 0.15 * noise


class LossCurve(Callback):
    """Prints why forward mode is used, each epoch's loss, and the accuracy."""

    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        print(WHY)

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        loss = trainer.callback_metrics["train/loss"]
        print(f"epoch {trainer.current_epoch + 1:3}   train/loss {loss:.4f}")

    def on_test_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        acc, pixels = (trainer.callback_metrics[f"test/acc{of}"] for of in ("", "_pixels"))
        print(f"test/acc {acc:.4f} by the nearest labelled image's label; by pixels {pixels:.4f}")


class Recorder(Callback):
    """Keeps the loss of every step, and the accuracy."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.acc = math.nan

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *_: Any
    ) -> None:
        self.losses.append(float(outputs["loss"]))

    def on_test_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.acc = float(trainer.callback_metrics["test/acc"])


def learn(
    callback: Callback, *, accelerator: str, devices: int, epochs: int, mode: Mode = "forward"
) -> None:
    """Trains and tests; the same data and first weights whatever the devices."""
    train_and_test(
        ContrastiveModel,
        DigitPairs(),
        callback,
        strategy=DataParallelStrategy(mode=mode),
        accelerator=accelerator,
        devices=devices,
        max_epochs=epochs,
        log_every_n_steps=1,
    )


def compare(accelerator: str, devices: int, epochs: int) -> None:
    """Prints the same training on one device, and on several in both modes, side by side."""
    jobs: list[tuple[int, Mode]] = [(1, "forward"), (devices, "forward"), (devices, "step")]
    runs = [Recorder() for _ in jobs]
    for run, (count, mode) in zip(runs, jobs, strict=True):
        learn(run, accelerator=accelerator, devices=count, epochs=epochs, mode=mode)
    rows = list(zip(*(run.losses for run in runs), strict=True))
    titles = ("step", "1 device", f"{devices} in forward mode", f"{devices} in step mode")
    print("{:>12}  {:>9}  {:>17}  {:>14}".format(*titles))
    for i in range(0, len(rows), len(rows) // epochs):
        print("{:12}  {:9.6f}  {:17.6f}  {:14.6f}".format(i + 1, *rows[i]))
    furthest = (max(abs(row[0] - row[i]) for row in rows) for i in range(3))
    print("{:>12}  {:9.1e}  {:17.1e}  {:14.1e}".format("furthest off", *furthest))
    print("{:>12}  {:9.4f}  {:17.4f}  {:14.4f}".format("test/acc", *(run.acc for run in runs)))


def main() -> None:
    parser = ScriptParser(__doc__.splitlines()[0], devices=4, epochs=40)
    parser.add_argument("--compare", action="store_true", help="the loss of one device beside ours")
    args = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    options = {key: getattr(args, key) for key in ("accelerator", "devices", "epochs")}
    with quiet():
        compare(**options) if args.compare else learn(LossCurve(), **options)


if __name__ == "__main__":
    main()
