"""What steps are timed with: a small convnet, a small transformer, or the user's own module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, LENGTH = 512, 32


@dataclass(frozen=True)
class Workload:
    """A module, its batches and how it is trained.

    Args:
        name: as the report has it.
        make: makes the module, from whatever seed.
        batches: makes some batches on the host, of about so many samples; those of the user's own
            data are as they are.
        strategy: options of the strategy, such as the mode.
        trainer: options of the Trainer, such as the precision.
        grows: whether batches are to grow until a step takes long enough to be timed.
        loader: makes the DataLoader of the user's own data, for batches of other sizes.
    """

    name: str
    make: Callable[[], LightningModule]
    batches: Callable[[int], Sequence[Any]]
    strategy: Mapping[str, Any] = field(default_factory=dict)
    trainer: Mapping[str, Any] = field(default_factory=dict)
    grows: bool = False
    loader: Callable[[], Any] | None = None


class _Timed(LightningModule):
    """Layers and a cross entropy."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """A mean over samples."""
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """What most use."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class _Transformer(nn.Module):
    """Two layers over tokens, and a class for each sequence."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(self.embed(tokens)).mean(1))
        return logits


def _convnet() -> LightningModule:
    def block(inside: int, outside: int) -> list[nn.Module]:
        convolution = nn.Conv2d(inside, outside, 3, stride=2, padding=1, bias=False)
        return [convolution, nn.BatchNorm2d(outside), nn.ReLU()]

    layers = [*block(3, 32), *block(32, 64), *block(64, 128)]
    return _Timed(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)))


def _images(n: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 3, 32, 32, generator=generator)
    return [(x, torch.randint(0, 10, (n,), generator=generator))]


def _tokens(n: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, VOCABULARY, (n, LENGTH), generator=generator)
    return [(x, torch.randint(0, 10, (n,), generator=generator))]


OWN_TWO = (
    Workload("convnet", _convnet, _images, grows=True),
    Workload("transformer", lambda: _Timed(_Transformer()), _tokens, grows=True),
)
