"""A GAN that draws scikit-learn's digits: manual optimisation with two optimizers.

python examples/gan.py --devices 4 --epochs 60
python examples/gan.py --devices 1 --epochs 60     # prints the same losses
python -m lightning_dp experiment=gan trainer.devices=4

`training_step` is written for one device. On several it runs once, with the whole batch: every call
of the generator and of the critic is spread over the devices, and optimizers, toggling and logging
are Lightning's own.
"""

import argparse
from itertools import pairwise

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import DataParallelStrategy

PIXELS = 64
SHADES = " .:-=+*#%@"


def network(*widths: int) -> nn.Sequential:
    """Linear layers with GELU between them."""
    layers: list[nn.Module] = []
    for width_in, width_out in pairwise(widths):
        layers += [nn.Linear(width_in, width_out), nn.GELU()]
    return nn.Sequential(*layers[:-1])


class GAN(L.LightningModule):
    """A generator of images [N, 64] from noise [N, latent], and a critic that tells them apart.

    The test compares the mean image of drawn and real digits (`test/distance`).

    Args:
        latent: numbers that an image is drawn from.
        width: of the hidden layers.
        lr: learning rate of both Adam optimizers.
    """

    def __init__(self, latent: int = 16, width: int = 256, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = network(latent, width, width, PIXELS)
        self.critic = network(PIXELS, width, width, 1)

    def forward(self, noise: Tensor) -> Tensor:
        pixels: Tensor = self.generator(noise)
        return pixels.sigmoid()

    def noise_for(self, images: Tensor) -> Tensor:
        """Noise [N, latent], drawn on the host, so that it does not depend on the devices."""
        return torch.randn(len(images), self.hparams["latent"]).to(images)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        (images,) = batch
        noise = self.noise_for(images)
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
        self.log_dict(losses, on_step=False, on_epoch=True, prog_bar=True)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        (images,) = batch
        self.drawn = self(self.noise_for(images))
        distance = (self.drawn.mean(0) - images.mean(0)).square().sum()
        self.log("test/distance", distance)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        nets = (self.generator, self.critic)
        return [
            torch.optim.Adam(net.parameters(), lr=self.hparams["lr"], betas=(0.5, 0.999))
            for net in nets
        ]


class Digits(L.LightningDataModule):
    """1,440 images [N, 64] for training and 357 for the test, with pixels in [0, 1].

    Args:
        batch_size: images per optimizer step, over all devices.
    """

    def __init__(self, batch_size: int = 96) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        pixels, _ = load_digits(return_X_y=True)
        images = torch.as_tensor(pixels, dtype=torch.float32) / 16
        self.train, self.test = TensorDataset(images[:1440]), TensorDataset(images[1440:])

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def test_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.test, batch_size=len(self.test))


def draw(images: Tensor) -> str:
    """Images [N, 64] side by side, as characters."""
    shades = (images.view(-1, 8, 8).clamp(0, 1) * (len(SHADES) - 1)).long().tolist()
    rows = zip(*shades, strict=True)
    return "\n".join(
        "   ".join("".join(SHADES[s] * 2 for s in part) for part in row) for row in rows
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="A GAN on several devices")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=60)
    args = parser.parse_args()
    L.seed_everything(42)
    trainer = L.Trainer(
        strategy=DataParallelStrategy(mode="forward", parallel_modules=["generator", "critic"]),
        accelerator=args.accelerator,
        devices=args.devices,
        max_epochs=args.epochs,
        log_every_n_steps=15,
        logger=False,
        enable_checkpointing=False,
    )
    model, data = GAN(), Digits()
    trainer.fit(model, data)
    for name in ("train/critic", "train/generator"):
        print(f"{name} {trainer.callback_metrics[name]:.4f}")
    trainer.test(model, data)
    print(draw(model.drawn[:4]))


if __name__ == "__main__":
    main()
