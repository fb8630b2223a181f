"""The modules that the laws are looked at with, and their batches. No data set, no file."""

from __future__ import annotations

from typing import Any, cast

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy

FEATURES, CLASSES = 12, 5


class Classifier(LightningModule):
    """A perceptron that logs, measures, and has a layer that no step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.net = self.layers()
        self.unused = nn.Linear(2, 2)
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")

    def layers(self) -> nn.Module:
        """What computes the logits."""
        return nn.Sequential(
            nn.Linear(FEATURES, 24), nn.Tanh(), nn.LayerNorm(24), nn.Linear(24, CLASSES)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.net(x)
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """A mean over samples."""
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.accuracy(logits, y)
        self.log("loss", loss, on_step=False, on_epoch=True)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        return loss

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        """Logits in the order of the samples."""
        return self.net(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam would make much of rounding where a gradient is nearly zero."""
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Complete(Classifier):
    """Every parameter has a gradient: in buckets, these are added where they land."""

    def __init__(self) -> None:
        super().__init__()
        del self.unused


class Normalized(Classifier):
    """With batch norm, whose statistics are those of the whole batch if they are synced."""

    def layers(self) -> nn.Module:
        """What computes the logits."""
        return nn.Sequential(
            nn.Linear(FEATURES, 24), nn.BatchNorm1d(24), nn.Tanh(), nn.Linear(24, CLASSES)
        )


class Contrastive(Classifier):
    """Its loss compares every sample with every other one: exact in forward mode alone."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """A loss over the whole batch."""
        z = F.normalize(self(batch[0]), dim=1)
        loss = F.cross_entropy(z @ z.T * 5, torch.arange(len(z), device=z.device))
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss


class Manual(Classifier):
    """Does its backward and its optimizer's step itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Returns the loss for the record alone."""
        optimizer: Any = self.optimizers()
        loss = F.cross_entropy(self(batch[0]), batch[1])
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss.detach()


class Compiled(Classifier):
    """Its layers are compiled."""

    def layers(self) -> nn.Module:
        """What computes the logits."""
        return cast(nn.Module, torch.compile(super().layers()))


def batches_of(sizes: list[int], dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Batches of so many samples, the same in every process."""
    generator = torch.Generator().manual_seed(7)
    batches = []
    for n in sizes:
        x = torch.randn(n, FEATURES, generator=generator, dtype=torch.float64)
        batches.append((x.to(dtype), torch.randint(0, CLASSES, (n,), generator=generator)))
    return batches
