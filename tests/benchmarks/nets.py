"""The layers of the benchmark's models: plain PyTorch."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn


class Bottleneck(nn.Module):
    """A residual block of three convolutions with batch norm."""

    def __init__(self, width: int, downsample: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        skip = nn.Sequential(nn.Conv2d(width, width, 1, bias=False), nn.BatchNorm2d(width))
        self.downsample = skip if downsample else None

    def forward(self, x: Tensor) -> Tensor:
        """Adds the block's answer to its input."""
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


class TinyResNet50(nn.Module):
    """The modules and parameters of a ResNet-50 at a width of a few channels."""

    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, padding=3, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        self.layers = nn.Sequential(
            *(
                nn.Sequential(*(Bottleneck(width, i == 0) for i in range(depth)))
                for depth in (3, 4, 6, 3)
            )
        )
        self.fc = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of ten classes."""
        logits: Tensor = self.fc(self.layers(self.stem(x)).mean((2, 3)))
        return logits

    def training_step(self, batch: Tensor) -> Tensor:
        """A loss that is a mean over the samples."""
        return self(batch).square().mean()


def convnet() -> nn.Sequential:
    """Three convolutions with batch norm, for images of 32 x 32."""

    def block(inside: int, outside: int, stride: int) -> list[nn.Module]:
        convolution = nn.Conv2d(inside, outside, 3, stride=stride, padding=1, bias=False)
        return [convolution, nn.BatchNorm2d(outside), nn.ReLU()]

    layers = [*block(3, 32, 1), *block(32, 64, 2), *block(64, 128, 2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


def plain_mlp(depth: int, width: int) -> nn.Sequential:
    """Layers of one width: where it is small there is hardly anything to compute in each."""
    layers = [m for _ in range(depth) for m in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, 10))


class Transformer(nn.Module):
    """An encoder over tokens; a causal one predicts the next token, another one a class.

    Args:
        vocabulary: how many tokens there are.
        outputs: logits of each prediction.
        width: of the layers.
        depth: layers.
        length: of the sequences.
        causal: whether there is a prediction for each token, from those up to it.
    """

    def __init__(
        self, vocabulary: int, outputs: int, width: int, depth: int, length: int, *, causal: bool
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.zeros(length, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, outputs)
        self.causal = causal
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        self.register_buffer("mask", mask if causal else None, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits, [B, L, outputs] or [B, outputs]."""
        x = self.layers(self.embed(tokens) + self.places, self.mask, is_causal=self.causal)
        logits: Tensor = self.head(x if self.causal else x.mean(1))
        return logits


class LookingBack(nn.Module):
    """Adds to every token what it says together with the one so many places before it.

    Texts stand one after another, without padding: the work is that of the tokens there are.
    """

    def __init__(self, width: int, distance: int) -> None:
        super().__init__()
        self.distance = distance
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Sequential(
            nn.Linear(2 * width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        """`places` are those of the tokens in their own texts."""
        now = self.norm(x)
        earlier = now.roll(self.distance, 0) * (places >= self.distance).unsqueeze(1)
        mixed: Tensor = self.mix(torch.cat([now, earlier], 1))
        return x + mixed


class TextNet(nn.Module):
    """Predicts each token of texts of unequal length from those before it."""

    def __init__(self, vocabulary: int, width: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary + 1, width)  # one more: the start of a text
        self.layers = nn.ModuleList(LookingBack(width, 2**n) for n in range(depth))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, texts: Tensor, lengths: Tensor) -> Tensor:
        """Logits [N, vocabulary] of the N tokens of texts [B, L], which are padded."""
        before = torch.full_like(texts, self.head.out_features)
        before[:, 1:] = texts[:, :-1]
        columns = torch.arange(texts.shape[1], device=texts.device).expand_as(texts)
        is_token = columns < lengths.unsqueeze(1)
        x, places = self.embed(before[is_token]), columns[is_token]
        for layer in self.layers:
            x = layer(x, places)
        logits: Tensor = self.head(x)
        return logits


def mlp(*widths: int) -> nn.Sequential:
    """Linear layers with GELU between them."""
    layers: list[nn.Module] = []
    for inside, outside in itertools.pairwise(widths):
        layers += [nn.Linear(inside, outside), nn.GELU()]
    return nn.Sequential(*layers[:-1])


class EvenLayers(nn.Module):
    """Layers of equal time and equally many bytes, 101 MB in all, that compute next to nothing.

    What they take on virtual time follows from the devices' speed alone: `flops` for a step with
    two samples, a third of it forward. Arithmetic is skipped, so that steps of 16 devices take a
    laptop seconds; and what is done with gradients takes as little beside it as it does on a GPU.
    """

    DEPTH, WIDTH, ROWS = 24, 1024, 78
    KERNELS = 6
    """In which a layer's time passes, forward: about 150 in all, as many as a ResNet-50 has with
    its norms and activations. What sums or packs is a kernel too, and waits for one that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(self.WIDTH, self.WIDTH) for _ in range(self.DEPTH))
        self.head = nn.Linear(self.WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of ten classes."""
        for layer in self.layers:
            x = _AsIfForMoreRows.apply(layer(x), layer.weight)
        logits: Tensor = self.head(x)
        return logits

    @classmethod
    def flops(cls) -> int:
        """Of a step."""
        return 3 * cls.DEPTH * 2 * (cls.ROWS + 2) * cls.WIDTH**2


class _AsIfForMoreRows(torch.autograd.Function):
    """Takes the time of a layer with `EvenLayers.ROWS` rows, and leaves its values alone.

    In the backward that is before the layer's own gradient is there.
    """

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
    """Multiplies matrices by 0: that is known to be 0 before anything is computed."""
    for rows in weight.detach()[: EvenLayers.ROWS].chunk(EvenLayers.KERNELS):
        torch.addmm(rows, rows, weight.detach(), beta=0, alpha=0)
