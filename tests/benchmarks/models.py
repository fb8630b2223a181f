"""What the benchmarks train: modules and their batches, each the worst case of something."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES, TOKENS, VOCABULARY, LENGTH = 10, 512, 8192, 64


class Model(LightningModule):
    """A net that makes logits of a batch's first tensor, and their mean cross-entropy."""

    def __init__(self, net: nn.Module, optimizer: Any = torch.optim.AdamW) -> None:
        super().__init__()
        self.net, self.optimizer = net, optimizer

    def loss(self, batch: Any, net: Callable[..., Tensor] | None = None) -> Tensor:
        """The mean loss; `net` is what a loop has made of the net, such as DDP around it."""
        x, y = batch
        logits = (net or self.net)(x)
        return F.cross_entropy(logits.flatten(0, -2), y.flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.net.parameters(), lr=1e-3)


class Residual(nn.Sequential):
    """Layers whose outputs are added to their inputs."""

    def forward(self, x: Tensor) -> Any:
        return x + super().forward(x)


class TinyResNet50(nn.Sequential):
    """About as many modules, parameters and buffers as a ResNet-50, at a width of 2 channels."""

    def __init__(self, width: int = 2) -> None:
        def layers(size: int, inside: int = width) -> list[nn.Module]:
            convolution = nn.Conv2d(inside, width, size, padding=size // 2, bias=False)
            return [convolution, nn.BatchNorm2d(width), nn.ReLU()]

        blocks = [Residual(*layers(1), *layers(3), *layers(1)) for _ in range(16)]
        head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES)
        super().__init__(*layers(7, 3), *blocks, *head)


def convnet() -> nn.Sequential:
    """Three convolutions with batch norm, for images of 32 x 32."""
    layers: list[nn.Module] = []
    for inside, outside, stride in ((3, 32, 1), (32, 64, 2), (64, 128, 2)):
        convolution = nn.Conv2d(inside, outside, 3, stride=stride, padding=1, bias=False)
        layers += [convolution, nn.BatchNorm2d(outside), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, CLASSES))


def mlp(depth: int, width: int, kind: type[nn.Linear] = nn.Linear) -> nn.Sequential:
    """Layers of one width: where it is small there is hardly anything to compute in each."""
    layers = [m for _ in range(depth) for m in (kind(width, width), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, CLASSES))


class Transformer(nn.Module):
    """An encoder over tokens [B, L]; a causal one predicts each next token, another one a class."""

    def __init__(self, vocabulary: int, outputs: int, depth: int, *, causal: bool = False) -> None:
        super().__init__()
        width = 128
        self.embed = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.zeros(LENGTH, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, outputs)
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH) if causal else None
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        causal = self.mask is not None
        x = self.layers(self.embed(tokens) + self.positions, self.mask, is_causal=causal)
        logits: Tensor = self.head(x if causal else x.mean(1))
        return logits


class EvenLayer(nn.Linear):
    """Takes the time of 80 samples for two, on virtual time alone: the arithmetic is skipped."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self._take_time()
        y.register_hook(lambda gradient: self._take_time(2))
        return y

    def _take_time(self, times: int = 1) -> None:
        weight = self.weight.detach()
        for _ in range(times):  # products that are multiplied by 0, which torch does not compute
            torch.addmm(weight[:78], weight[:78], weight, beta=0, alpha=0)


def _vectors(*shape: int) -> Callable[[int, torch.Generator], Any]:
    return lambda n, g: (
        torch.randn(n, *shape, generator=g),
        torch.randint(CLASSES, (n,), generator=g),
    )


def _tokens(n: int, g: torch.Generator) -> Any:
    x = torch.randint(TOKENS, (n, LENGTH), generator=g)
    return x, torch.randint(CLASSES, (n,), generator=g)


def _sentences(n: int, g: torch.Generator) -> Any:
    x = torch.randint(VOCABULARY, (n, LENGTH + 1), generator=g)
    return x[:, :-1].contiguous(), x[:, 1:].contiguous()


class Workload(NamedTuple):
    """What makes a net, its optimizer, what makes a batch of n samples, and how many it has.

    On virtual time a device computes `rate` operations per second: with that of `even_layers` it
    takes 100 ms for 2 samples, with the others' a nanosecond for each byte of the model.
    """

    net: Callable[[], nn.Module]
    optimizer: Any
    batch: Callable[[int, torch.Generator], Any]
    samples: int
    rate: float = 0.0

    def make(self) -> Model:
        return Model(self.net(), self.optimizer)

    def batches(self, samples: int) -> list[Any]:
        generator = torch.Generator().manual_seed(0)
        return [self.batch(samples, generator) for _ in range(4)]


ADAMW, SGD = torch.optim.AdamW, torch.optim.SGD
WORKLOADS = {
    "convnet": Workload(convnet, ADAMW, _vectors(3, 32, 32), 64),
    "transformer": Workload(partial(Transformer, TOKENS, CLASSES, 3), ADAMW, _tokens, 32, 2.951e12),
    "language_model": Workload(
        partial(Transformer, VOCABULARY, VOCABULARY, 2, causal=True),
        ADAMW,
        _sentences,
        16,
        9.086e11,
    ),
    "wide": Workload(lambda: mlp(24, 1024), SGD, _vectors(1024), 64),
    "even_layers": Workload(lambda: mlp(24, 1024, EvenLayer), SGD, _vectors(1024), 2, 1.2e11),
    "mlp": Workload(lambda: mlp(60, 16), ADAMW, _vectors(16), 32),  # bound by Python
    "resnet": Workload(TinyResNet50, ADAMW, _vectors(3, 8, 8), 32),
}
