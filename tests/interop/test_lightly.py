"""lightly: modules of the package `pytorch_lightning`, for self-supervised learning."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from comparison import Job, as_one_device
from torch import Tensor, nn
from torch.utils.data import DataLoader

pytest.importorskip("lightly.loss")
pytest.importorskip("pytorch_lightning")

from lightly.loss import NegativeCosineSimilarity, NTXentLoss
from lightly.models.modules import (
    SimCLRProjectionHead,
    SimSiamPredictionHead,
    SimSiamProjectionHead,
)
from lightly.utils.benchmarking import BenchmarkModule
from lightly.utils.benchmarking.linear_classifier import FinetuneClassifier

pytestmark = pytest.mark.interop

DOUBLE = {"precision": "64-true"}
IMAGES, KINDS, BATCH = 46, 3, 10  # the last batch has 6


@cache
def images() -> list[tuple[tuple[Tensor, Tensor], int, str]]:
    generator = torch.Generator().manual_seed(0)
    rows = []
    for i in range(IMAGES):
        image = torch.randn(3, 8, 8, generator=generator) + i % KINDS
        views = tuple(image + 0.1 * torch.randn(3, 8, 8, generator=generator) for _ in range(2))
        rows.append((views, i % KINDS, f"image {i}"))
    return rows


def of_one_view() -> DataLoader[Any]:
    return DataLoader([(view, kind, name) for (view, _), kind, name in images()], BATCH)


def of_two_views() -> DataLoader[Any]:
    return DataLoader(images(), BATCH)


def backbone() -> nn.Module:
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(32, 16))


class Benchmark(BenchmarkModule):
    """With the library's own validation: the nearest neighbours in features of the whole set."""

    def __init__(self) -> None:
        super().__init__(in_double(of_one_view()), num_classes=KINDS, knn_k=5)
        self.backbone = backbone()

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.backbone(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)  # faster, it is chaotic


class SimSiam(Benchmark):
    def __init__(self) -> None:
        super().__init__()
        self.projection = SimSiamProjectionHead(16, 16, 8)
        self.prediction = SimSiamPredictionHead(8, 4, 8)
        self.criterion = NegativeCosineSimilarity()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.projection(self.backbone(x))
        return z.detach(), self.prediction(z)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x0, x1), _, _ = batch
        (z0, p0), (z1, p1) = self(x0), self(x1)
        loss = 0.5 * (self.criterion(z0, p1) + self.criterion(z1, p0))
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


class SimCLR(Benchmark):
    def __init__(self) -> None:
        super().__init__()
        self.projection = SimCLRProjectionHead(16, 16, 8)
        self.criterion = NTXentLoss()

    def forward(self, x: Tensor) -> Tensor:
        return self.projection(self.backbone(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x0, x1), _, _ = batch
        loss = self.criterion(self(x0), self(x1))
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


def in_double(loader: DataLoader[Any]) -> list[Any]:
    """What the module loads itself, past the Trainer."""
    return [[column.double() if i == 0 else column for i, column in enumerate(b)] for b in loader]


class Finetuned(FinetuneClassifier):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])


def finetuned() -> Finetuned:
    return Finetuned(backbone(), BATCH, lr=1.0, feature_dim=16, num_classes=KINDS, topk=(1, 2))


def job(model: str, make: Any, data: Any) -> Job:
    options: dict[str, Any] = {"package": "pytorch_lightning", "close_logs": 1e-6}  # accuracies
    return Job("lightly", model, make, data, of_one_view, **options, trainer=DOUBLE)


FINETUNED = job("FinetuneClassifier", finetuned, of_one_view)
SIMSIAM = job("SimSiam", SimSiam, of_two_views)
SIMCLR = job("SimCLR", SimCLR, of_two_views)


# Heads normalise by the batch, and validation calls the backbone alone.
SYNCED: dict[str, Any] = {"trainer": {"sync_batchnorm": True}}
BACKBONE = {"mode": "forward", "parallel_modules": ["backbone"], **SYNCED}
test_as_one_device = as_one_device(
    (FINETUNED, {}),
    (FINETUNED, {"mode": "forward"}),
    (SIMSIAM, SYNCED),
    (SIMSIAM, BACKBONE),
    (SIMCLR, BACKBONE),  # its loss is over all pairs of the batch
)
