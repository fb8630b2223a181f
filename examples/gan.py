"""Manual optimisation: a GAN that draws scikit-learn's digits; two optimizers, stepped by hand.

python examples/gan.py --devices 4 --epochs 60
python examples/gan.py --compare --epochs 5
python -m lightning_dp experiment=gan trainer.devices=4

`training_step` is written for one device. On several it runs once, with the whole batch: each call
of the generator and of the critic is spread over the devices, and optimizers, toggling and logging
are Lightning's own. `--compare` puts the losses of one device beside those of several.
"""

import logging
from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam, Optimizer
from torch.utils.data import DataLoader

from lightning_dp import DataParallelStrategy
from lightning_dp.app.options import check_at_least
from lightning_dp.app.quiet import quiet
from lightning_dp.app.scripts import ScriptParser, train_and_test

Batch = tuple[Tensor, Tensor]
OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]

PIXELS = 64
TEST_IMAGES = 357
ADAM = partial(Adam, lr=3e-3, betas=(0.5, 0.999))
SHADES = " .:-=+*#%@"


def network(*widths: int) -> nn.Sequential:
    """Linear layers. GELU between them, whose gradient has no jump: rounding stays small."""
    layers: list[nn.Module] = []
    for width_in, width_out in pairwise(widths):
        layers += [nn.Linear(width_in, width_out), nn.GELU()]
    return nn.Sequential(*layers[:-1])


class GAN(L.LightningModule):
    """A generator of images [N, 64] from noise [N, latent], and a critic that tells them apart.

    Testing measures how far drawn images are from real ones that were never trained on:
    `test/distance` is the Fréchet distance of their pixels' means and covariances, and
    `test/distance_trained` that of the images trained on, to compare.

    Args:
        latent: numbers per image that it is drawn from.
        width: of the hidden layers.
        optimizer: makes each of the two optimizers from its parameters; by default Adam.
    """

    def __init__(
        self, latent: int = 16, width: int = 256, optimizer: OptimizerFactory = ADAM
    ) -> None:
        super().__init__()
        check_at_least("latent", latent, 1)
        check_at_least("width", width, 1)
        self.save_hyperparameters("latent", "width")
        self.automatic_optimization = False
        self.make_optimizer = optimizer
        self.generator = network(latent, width, width, PIXELS)
        self.critic = network(PIXELS, width, width, 1)

    def forward(self, noise: Tensor) -> Tensor:
        pixels: Tensor = self.generator(noise)
        return pixels.sigmoid()

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        images, noise = batch
        for_generator, for_critic = self.optimizers()  # type: ignore[attr-defined]  # a list of two

        self.toggle_optimizer(for_critic)
        drawn = self(noise).detach()
        critic_loss = (
            F.softplus(self.critic(drawn)).mean() + F.softplus(-self.critic(images)).mean()
        )
        for_critic.zero_grad()
        self.manual_backward(critic_loss)
        for_critic.step()
        self.untoggle_optimizer(for_critic)

        self.toggle_optimizer(for_generator)
        generator_loss = F.softplus(-self.critic(self(noise))).mean()
        for_generator.zero_grad()
        self.manual_backward(generator_loss)
        for_generator.step()
        self.untoggle_optimizer(for_generator)

        losses = {"train/critic": critic_loss, "train/generator": generator_loss}
        self.log_dict(losses, on_step=True, on_epoch=True)

    def on_test_epoch_start(self) -> None:
        self.seen: list[list[Batch]] = [[], []]

    def test_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        images, noise = batch
        self.seen[dataloader_idx].append((images, self(noise)))

    def on_test_epoch_end(self) -> None:
        (test, drawn), (trained, _) = (
            map(torch.cat, zip(*seen, strict=True)) for seen in self.seen
        )
        self.drawn = drawn.cpu()
        self.log("test/distance", frechet_distance(drawn, test))
        self.log("test/distance_trained", frechet_distance(trained, test))

    def configure_optimizers(self) -> Any:
        return [self.make_optimizer(net.parameters()) for net in (self.generator, self.critic)]


def frechet_distance(a: Tensor, b: Tensor) -> Tensor:
    """|mean difference|^2 + tr(A + B - 2 (AB)^(1/2)) of the rows' covariances A and B, 0-dim.

    Dowson and Landau, "The Fréchet distance between multivariate normal distributions", 1982.
    """
    a, b = a.double().cpu(), b.double().cpu()
    of_a, of_b = torch.cov(a.T), torch.cov(b.T)
    # The eigenvalues of AB are those of the symmetric A^(1/2) B A^(1/2).
    values, vectors = torch.linalg.eigh(of_a)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    cross = torch.linalg.eigvalsh(root @ of_b @ root).clamp(min=0).sqrt().sum()
    distance = (a.mean(0) - b.mean(0)).square().sum() + of_a.trace() + of_b.trace() - 2 * cross
    return torch.as_tensor(distance).float()


class DigitsAndNoise(L.LightningDataModule):
    """Images [N, 64] with pixels in [0, 1], and for each of them the noise for a drawn one.

    Args:
        batch_size: images per optimizer step, over all devices.
        latent: numbers per noise, as many as the model has.
        seed: of order and noise, which depends on it, the epoch and the image, and on nothing
            else: any number of devices sees the same data.
    """

    def __init__(self, batch_size: int = 96, latent: int = 16, seed: int = 0) -> None:
        super().__init__()
        check_at_least("batch_size", batch_size, 1)
        self.batch_size = batch_size
        self.latent = latent
        self.seed = seed

    def setup(self, stage: str) -> None:
        pixels, digits = load_digits(return_X_y=True)
        self.images = torch.as_tensor(pixels, dtype=torch.float32) / 16
        self.train, self.test = train_test_split(
            range(len(digits)), test_size=TEST_IMAGES, stratify=digits, random_state=0
        )

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(self.seed)
        return self._loader(self.train, shuffle=True, generator=generator)

    def test_dataloader(self) -> list[DataLoader[Any]]:
        return [self._loader(self.test), self._loader(self.train)]

    def _loader(self, indices: list[int], **options: Any) -> DataLoader[Any]:
        return DataLoader(
            indices,  # type: ignore[arg-type]  # anything with a length will do
            batch_size=self.batch_size,
            collate_fn=self._batch,
            **options,
        )

    def _batch(self, indices: list[int]) -> Batch:
        epoch = self.trainer.current_epoch if self.trainer else 0
        noise = torch.stack([self._noise(epoch, index) for index in indices])
        return self.images[indices], noise

    def _noise(self, epoch: int, index: int) -> Tensor:
        seed = (self.seed << 40) + (epoch << 20) + index
        return torch.randn(self.latent, generator=torch.Generator().manual_seed(seed))


class Drawings(Callback):
    """Prints each epoch's losses, and in the end some drawn digits and how far they are off."""

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        critic, generator = (
            trainer.callback_metrics[f"train/{name}_epoch"] for name in ("critic", "generator")
        )
        print(
            f"epoch {trainer.current_epoch + 1:3}   train/critic {critic:.4f}   "
            f"train/generator {generator:.4f}"
        )

    def on_test_end(self, trainer: L.Trainer, module: GAN) -> None:  # type: ignore[override]  # its own
        images = module.drawn[:4].view(-1, 8, 8)
        for row in range(8):
            print("   ".join(_line(image[row]) for image in images))
        own, trained = (trainer.callback_metrics[f"test/distance{of}"] for of in ("", "_trained"))
        print(f"test/distance {own:.3f} of drawn digits; of those trained on {trained:.3f}")


def _line(pixels: Tensor) -> str:
    return "".join(SHADES[int(pixel * (len(SHADES) - 1))] * 2 for pixel in pixels)


class Recorder(Callback):
    """Keeps both losses of every step, and the distance."""

    def __init__(self) -> None:
        self.losses: list[tuple[float, float]] = []
        self.distance = 0.0

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        critic, generator = (
            float(trainer.callback_metrics[f"train/{name}_step"])
            for name in ("critic", "generator")
        )
        self.losses.append((critic, generator))

    def on_test_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.distance = float(trainer.callback_metrics["test/distance"])


def learn(callback: Callback, *, accelerator: str, devices: int, epochs: int) -> None:
    """Trains and tests; the same data and first weights whatever the devices."""
    train_and_test(
        GAN,
        DigitsAndNoise(),
        callback,
        strategy=DataParallelStrategy(mode="forward", parallel_modules=["generator", "critic"]),
        accelerator=accelerator,
        devices=devices,
        max_epochs=epochs,
        log_every_n_steps=1,
    )


def compare(accelerator: str, devices: int, epochs: int) -> None:
    """Prints the same training on one device and on several, side by side."""
    one, several = Recorder(), Recorder()
    for run, count in ((one, 1), (several, devices)):
        learn(run, accelerator=accelerator, devices=count, epochs=epochs)
    rows = list(zip(one.losses, several.losses, strict=True))
    print("critic and generator")
    print("{:>13}  {:>19}  {:>19}".format("step", "1 device", f"{devices} devices"))
    for i in range(0, len(rows), len(rows) // epochs):
        pairs = (f"{critic:9.6f} {generator:9.6f}" for critic, generator in rows[i])
        print("{:13}  {:>19}  {:>19}".format(i + 1, *pairs))
    furthest = max(abs(x - y) for a, b in rows for x, y in zip(a, b, strict=True))
    print(f"{'furthest off':>13}  {'':19}  {furthest:19.1e}")
    print(f"{'test/distance':>13}  {one.distance:19.4f}  {several.distance:19.4f}")


def main() -> None:
    parser = ScriptParser(__doc__.splitlines()[0], devices=4, epochs=60)
    parser.add_argument("--compare", action="store_true", help="the losses of one device beside")
    args = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    options = {key: getattr(args, key) for key in ("accelerator", "devices", "epochs")}
    with quiet():
        compare(**options) if args.compare else learn(Drawings(), **options)


if __name__ == "__main__":
    main()
