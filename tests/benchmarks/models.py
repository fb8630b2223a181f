"""What the benchmarks train: modules and their batches, each the worst case of something."""

from __future__ import annotations

from collections.abc import Callable
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


class Bottleneck(nn.Module):
    """A residual block of three convolutions with batch norm."""

    def __init__(self, width: int, downsample: bool) -> None:
        super().__init__()
        sizes = (1, 3, 1)
        self.convs = nn.ModuleList(nn.Conv2d(width, width, s, padding=s // 2) for s in sizes)
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in sizes)
        self.relu = nn.ReLU()
        skip = nn.Sequential(nn.Conv2d(width, width, 1, bias=False), nn.BatchNorm2d(width))
        self.downsample = skip if downsample else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for conv, norm in zip(self.convs, self.norms, strict=True):
            y = norm(conv(self.relu(y)))
        return self.relu(y + self.downsample(x))


class TinyResNet50(nn.Sequential):
    """About as many modules, parameters and buffers as a ResNet-50, at a width of 2 channels."""

    def __init__(self, width: int = 2) -> None:
        blocks = [Bottleneck(width, i == 0) for depth in (3, 4, 6, 3) for i in range(depth)]
        stem = nn.Conv2d(3, width, 7, padding=3, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES)
        super().__init__(*stem, *blocks, *head)


def convnet() -> nn.Sequential:
    """Three convolutions with batch norm, for images of 32 x 32."""
    layers: list[nn.Module] = []
    for inside, outside, stride in ((3, 32, 1), (32, 64, 2), (64, 128, 2)):
        convolution = nn.Conv2d(inside, outside, 3, stride=stride, padding=1, bias=False)
        layers += [convolution, nn.BatchNorm2d(outside), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, CLASSES))


def mlp(depth: int, width: int) -> nn.Sequential:
    """Layers of one width: where it is small there is hardly anything to compute in each."""
    layers = [m for _ in range(depth) for m in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, CLASSES))


class Transformer(nn.Module):
    """An encoder over tokens [B, L]; a causal one predicts each next token, another one a class."""

    def __init__(self, vocabulary: int, outputs: int, depth: int, *, causal: bool) -> None:
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


class EvenLayers(nn.Module):
    """Layers of equal time and equally many bytes, 101 MB in all, for virtual time alone.

    A step of two samples takes `FLOPS` operations, a third of them forward, in about 150 kernels,
    as many as a ResNet-50 has. The arithmetic is skipped: steps of 16 devices take seconds.
    """

    DEPTH, WIDTH, ROWS, KERNELS = 24, 1024, 78, 6
    FLOPS = 3 * DEPTH * 2 * (ROWS + 2) * WIDTH**2

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(self.WIDTH, self.WIDTH) for _ in range(self.DEPTH))
        self.head = nn.Linear(self.WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = _TakesTime.apply(layer(x), layer.weight)
        logits: Tensor = self.head(x)
        return logits


class _TakesTime(torch.autograd.Function):
    """Takes the time of a layer with `EvenLayers.ROWS` rows, and leaves its values alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        _take_time(weight)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        for _ in range(2):
            _take_time(weight)
        return gradient, None


def _take_time(weight: Tensor) -> None:
    """Multiplies matrices by 0, which torch does not compute."""
    for rows in weight.detach()[: EvenLayers.ROWS].chunk(EvenLayers.KERNELS):
        torch.addmm(rows, rows, weight.detach(), beta=0, alpha=0)


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
    """What makes a net, its optimizer, what makes a batch of n samples, and how many it has."""

    net: Callable[[], nn.Module]
    optimizer: Any
    batch: Callable[[int, torch.Generator], Any]
    samples: int

    def make(self) -> Model:
        return Model(self.net(), self.optimizer)

    def batches(self, samples: int | None = None, count: int = 4) -> list[Any]:
        generator = torch.Generator().manual_seed(0)
        return [self.batch(samples or self.samples, generator) for _ in range(count)]


def classifier() -> nn.Module:
    return Transformer(TOKENS, CLASSES, 3, causal=False)


def language_model() -> nn.Module:
    """Large outputs and gradients."""
    return Transformer(VOCABULARY, VOCABULARY, 2, causal=True)


ADAMW, SGD = torch.optim.AdamW, torch.optim.SGD
WORKLOADS = {
    "convnet": Workload(convnet, ADAMW, _vectors(3, 32, 32), 64),
    "transformer": Workload(classifier, ADAMW, _tokens, 32),
    "language_model": Workload(language_model, ADAMW, _sentences, 16),
    "wide": Workload(lambda: mlp(24, 1024), SGD, _vectors(1024), 64),
    "mlp": Workload(lambda: mlp(60, 16), ADAMW, _vectors(16), 32),  # bound by Python
    "resnet": Workload(TinyResNet50, ADAMW, _vectors(3, 8, 8), 32),
    "even_layers": Workload(EvenLayers, SGD, _vectors(1024), 2),
}
"""By name; `even_layers` takes time on virtual time alone, and 2 samples are those of a device."""
