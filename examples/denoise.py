"""A U-Net that removes noise from pages of digits: outputs as large as the inputs.

python examples/denoise.py --devices 4 --epochs 16
python examples/denoise.py --compare
python -m lightning_dp experiment=denoise trainer.devices=4

The root device has more in its memory than the others: the optimizer's state, and what comes back
from all of them, here whole images. With `split="memory"` it gets fewer samples, so that all
devices are equally full, where they count their memory, as GPUs do. `--compare` shows the peaks of
an even split beside.
"""

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.image import PeakSignalNoiseRatio

from lightning_dp import DataParallelMonitor, DataParallelStrategy
from lightning_dp.app.options import check_at_least, check_multiple
from lightning_dp.app.quiet import quiet
from lightning_dp.app.scripts import (
    ScriptParser,
    loss_rows,
    print_rows,
    short_fits,
    train_and_test,
)
from lightning_dp.monitor.history import Period

Batch = tuple[Tensor, Tensor]
OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]

VAL_DIGITS = 177
TEST_DIGITS = 180
VAL_PAGES = TEST_PAGES = 64
SPLITS = ("even", "memory")
COMPARED_STEPS = 16

ADAMW = partial(AdamW, lr=2e-3)


def conv_block(channels_in: int, channels_out: int, stride: int = 1) -> nn.Sequential:
    """A 3 x 3 convolution, normalised over each image: batch norm would see parts of the batch."""
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, stride, padding=1),
        nn.GroupNorm(1, channels_out),
        nn.GELU(),
    )


class Level(nn.Module):
    """A level of a U-Net (Ronneberger et al., 2015), and in it those of half the size.

    Their outcome is added, where the original has it beside.

    Args:
        channels: of this level; the next has twice as many.
        below: levels below this one.
    """

    def __init__(self, channels: int, below: int) -> None:
        super().__init__()
        self.first = conv_block(channels, channels)
        self.inner = nn.Identity() if not below else self._smaller(channels, below)
        self.last = conv_block(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y: Tensor = self.last(x + self.inner(x))
        return y

    @staticmethod
    def _smaller(channels: int, below: int) -> nn.Sequential:
        return nn.Sequential(
            conv_block(channels, 2 * channels, stride=2),
            Level(2 * channels, below - 1),
            nn.ConvTranspose2d(2 * channels, channels, 2, stride=2),
        )


class Denoiser(L.LightningModule):
    """Estimates images [N, 1, H, W] with pixels in [0, 1] from what noise has left of them.

    It logs the peak signal-to-noise ratio in dB, 10 log10(1 / mean squared error): a tenth of the
    error is 10 dB more.

    Args:
        width: channels of the first level; each further one has twice as many.
        levels: levels; height and width have to be multiples of 2 ** (levels - 1).
        optimizer: makes the optimizer from the parameters; by default AdamW.
    """

    def __init__(
        self, width: int = 32, levels: int = 3, optimizer: OptimizerFactory = ADAMW
    ) -> None:
        super().__init__()
        check_at_least("width", width, 1)
        check_at_least("levels", levels, 1)
        self.save_hyperparameters("width", "levels")
        self.levels = levels
        self.make_optimizer = optimizer
        self.noise = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            Level(width, levels - 1),
            nn.Conv2d(width, 1, 3, padding=1),
        )
        ratios = (PeakSignalNoiseRatio(data_range=1.0) for _ in range(4))
        self.train_psnr, self.val_psnr, self.test_psnr, self.noisy_psnr = ratios

    def forward(self, noisy: Tensor) -> Tensor:
        for side, pixels in zip(("height", "width"), noisy.shape[2:], strict=True):
            check_multiple(side, pixels, 2 ** (self.levels - 1), f"levels={self.levels}")
        denoised: Tensor = noisy - self.noise(noisy)
        return denoised

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        noisy, clean = batch
        denoised = self(noisy)
        # Measured over the whole batch, so all devices' images come to the output device.
        self.train_psnr.update(denoised, clean)
        self.log("train/psnr", self.train_psnr, on_step=False, on_epoch=True)
        return F.mse_loss(denoised, clean)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        noisy, clean = batch
        self.val_psnr.update(self(noisy), clean)
        self.log("val/psnr", self.val_psnr)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        noisy, clean = batch
        self.test_psnr.update(self(noisy), clean)
        self.noisy_psnr.update(noisy, clean)
        self.log("test/psnr", self.test_psnr)
        self.log("test/psnr_noisy", self.noisy_psnr)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        denoised: Tensor = self(batch[0])
        return denoised

    def configure_optimizers(self) -> Optimizer:
        optimizer: Optimizer = self.make_optimizer(self.parameters())
        return optimizer


class DigitPages(L.LightningDataModule):
    """Pages of scikit-learn's digits, 1,797 real images of 8 x 8 pixels, side by side, with noise.

    No digit of the pages for validation and testing is in those for training.

    Args:
        batch_size: pages per optimizer step, over all devices.
        pages: for training; the last batch of an epoch is left out if it is not full.
        side: digits in a row and in a column of a page.
        noise: standard deviation of what is added to pixels in [0, 1]; in training anew each time.
        seed: of what is drawn: pages, order and noise are the same whatever the devices.
    """

    def __init__(
        self,
        batch_size: int = 32,
        pages: int = 512,
        side: int = 4,
        noise: float = 0.2,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_at_least("batch_size", batch_size, 1)
        check_at_least("pages", pages, batch_size)
        check_at_least("side", side, 1)
        check_at_least("noise", noise, 0.0)
        self.batch_size = batch_size
        self.pages = pages
        self.side = side
        self.noise = noise
        self.seed = seed

    def setup(self, stage: str) -> None:
        draw = torch.Generator().manual_seed(self.seed)
        digits = torch.as_tensor(load_digits().images, dtype=torch.float32) / 16
        digits = digits[torch.randperm(len(digits), generator=draw)]
        test, val, train = digits.tensor_split([TEST_DIGITS, TEST_DIGITS + VAL_DIGITS])
        self.train = self._pages(train, self.pages, draw)
        self.val = self._noisy(self._pages(val, VAL_PAGES, draw), draw)
        self.test = self._noisy(self._pages(test, TEST_PAGES, draw), draw)

    def train_dataloader(self) -> DataLoader[Any]:
        draw = torch.Generator().manual_seed(self.seed)

        def with_noise(pages: list[Tensor]) -> Batch:
            return self._noisy(torch.stack(pages), draw)

        pages: Any = self.train
        options: dict[str, Any] = {"shuffle": True, "drop_last": True, "generator": draw}
        return DataLoader(pages, self.batch_size, collate_fn=with_noise, **options)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(*self.val), self.batch_size)

    def test_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(*self.test), self.batch_size)

    def predict_dataloader(self) -> DataLoader[Any]:
        return self.test_dataloader()

    def _pages(self, digits: Tensor, count: int, draw: torch.Generator) -> Tensor:
        """Pages [count, 1, H, W] of digits [N, 8, 8]."""
        places = torch.randint(len(digits), (count, self.side, self.side), generator=draw)
        rows = digits[places].transpose(2, 3)  # [count, side, 8, side, 8]
        return rows.reshape(count, 1, 8 * self.side, 8 * self.side)

    def _noisy(self, clean: Tensor, draw: torch.Generator) -> Batch:
        return clean + self.noise * torch.randn(clean.shape, generator=draw), clean


class Progress(DataParallelMonitor):
    """Watches the devices; prints each epoch's result, and in the end their memory and a digit."""

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        dbs = [trainer.callback_metrics.get(f"{of}/psnr", math.nan) for of in ("train", "val")]
        epoch = trainer.current_epoch + 1
        print("epoch {:3}   train/psnr {:.2f}   val/psnr {:.2f} dB".format(epoch, *dbs), flush=True)

    def on_fit_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        periods = by_sizes(self.periods)
        names = ("as it began", "as it ended") if len(periods) > 1 else ("in all steps",)
        print_peaks(dict(zip(names, periods[:1] + periods[-1:], strict=False)))

    def on_test_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        psnr, noisy = (trainer.callback_metrics[f"test/psnr{of}"] for of in ("", "_noisy"))
        print(f"test/psnr {psnr:.2f} dB; of the noisy images {noisy:.2f} dB")
        data = getattr(trainer, "datamodule", None)
        if isinstance(module, Denoiser) and isinstance(data, DigitPages):
            with torch.no_grad():
                denoised = module(data.test[0][:1].to(module.device)).cpu()
            print("A test digit with noise, without, and as it was:")
            print(picture([data.test[0], denoised, data.test[1]]))


def sizes(period: Period) -> tuple[int, ...]:
    """The samples of each device in a step."""
    return tuple(n // period.steps for n in period.samples)


def by_sizes(periods: Sequence[Period]) -> list[Period]:
    """Joins those that follow each other and have the same samples on every device."""
    return [sum(same, Period()) for _, same in groupby(periods, key=sizes)]


def print_peaks(rows: dict[str, Period]) -> None:
    """Prints of each period the samples and the peaks of all devices, where these are counted."""
    if not any(any(period.peak_bytes) for period in rows.values()):
        print("no peaks of memory: several devices that count it have them, such as GPUs")
        return
    cells = [["", "samples per device", "peak memory per device, MiB", "fullest / mean"]]
    for name, period in rows.items():
        samples = " ".join(f"{size:2}" for size in sizes(period))
        memory = " ".join(f"{peak / 2**20:5.1f}" for peak in period.peak_bytes)
        cells.append([name, samples, memory, f"{period.imbalance(period.peak_bytes):.3f}"])
    print_rows(cells)


def picture(images: Sequence[Tensor]) -> str:
    """The first digit of the first page of each, side by side, in letters."""
    shades = " .:-=+*#%@"
    digits = torch.cat([image[0, 0, :8, :8] for image in images], dim=1).clamp(0, 1)
    letters = ([2 * shades[round(9 * pixel)] for pixel in row] for row in digits.tolist())
    return "\n".join("   ".join("".join(row[i : i + 8]) for i in (0, 8, 16)) for row in letters)


def compare(data: DigitPages, accelerator: str, devices: int) -> None:
    """Prints the same steps on one device, and on several with each split, side by side."""
    fits = short_fits(
        Denoiser,
        data,
        SPLITS,
        accelerator=accelerator,
        devices=devices,
        steps=COMPARED_STEPS,
    )
    print_rows(loss_rows(fits))
    print_peaks({split: by_sizes(fits[split].steps)[-1] for split in SPLITS})


def main() -> None:
    parser = ScriptParser("A denoiser.", devices=4, epochs=16)
    parser.add_argument("--split", default="memory", choices=SPLITS, help="how batches are cut")
    parser.add_argument("--pages", type=int, default=512, help="pages to train on")
    parser.add_argument("--compare", action="store_true", help="a few steps with each split")
    args = parser.parse_args()
    if args.compare and args.devices < 2:
        parser.error("--compare: expected at least 2 devices, got --devices=1")

    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    data = DigitPages(pages=args.pages)
    with quiet():
        if args.compare:
            compare(data, args.accelerator, args.devices)
            return
        train_and_test(
            Denoiser,
            data,
            Progress(),
            strategy=DataParallelStrategy(split=args.split),
            accelerator=args.accelerator,
            devices=args.devices,
            max_epochs=args.epochs,
        )


if __name__ == "__main__":
    main()
