"""What is trained: LightningModules and their batches, each the worst case of something.

The same modules are trained by loops of plain PyTorch: a loop calls `loop_step` with what it has
made of the module's parts, such as DDP around them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from benchmarks import nets
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

BATCHES = 4
"""Different ones, which take turns."""

CLASSES, TOKENS, LARGE_VOCABULARY, LENGTH = 10, 512, 8192, 64
LONGEST = 256  # tokens of a text
PIXELS, LATENT = 784, 64


class Spread(Protocol):
    """Gives what a loop has made of a part of the model, and calls instead of it."""

    def __call__(self, part: nn.Module, *, trained: bool = True) -> Callable[..., Any]:
        """DDP has to know whether gradients of the part come of this call."""


class Model(LightningModule):
    """A net, a mean loss of its outputs, and one optimizer.

    Args:
        net: makes outputs of a batch's first tensor; the others are the loss's.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def inputs(self, batch: Any) -> tuple[Tensor, ...]:
        """What `forward` takes of a batch."""
        return (batch[0],)

    def targets(self, batch: Any) -> tuple[Tensor, ...]:
        """What the loss takes of a batch."""
        return (batch[1],)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.net(*inputs)
        return logits

    def loss(self, logits: Tensor, *targets: Tensor) -> Tensor:
        """A mean over samples."""
        return F.cross_entropy(logits, targets[0])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """As most are."""
        return self.loss(self(*self.inputs(batch)), *self.targets(batch))

    def configure_optimizers(self) -> Any:
        """What most use."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def parts(self) -> list[nn.Module]:
        """The modules that a loop wraps."""
        return [self]

    def loop_step(
        self,
        spread: Spread,
        inputs: Any,
        batch: Any,
        optimizers: Sequence[torch.optim.Optimizer],
        backward: Callable[[Tensor], Any],
    ) -> Tensor:
        """A training step of plain PyTorch; returns the loss.

        Args:
            spread: gives what is called instead of a part.
            inputs: the batch where the wrapped parts expect it.
            batch: the batch on the device of the outputs.
            optimizers: of `configure_optimizers`.
            backward: is called with the loss.
        """
        optimizers[0].zero_grad()
        loss = self.loss(spread(self)(*self.inputs(inputs)), *self.targets(batch))
        backward(loss)
        optimizers[0].step()
        return loss.detach()


class Wide(Model):
    """About 100 MB of gradients, as a ResNet-50 has, and one kernel for all of the update."""

    def configure_optimizers(self) -> Any:
        """No state, of which each of many simulated devices would take its part of the host."""
        return torch.optim.SGD(self.parameters(), lr=1e-2)


class LanguageModel(Model):
    """Predicts each next token; logits of a large vocabulary are most of its memory."""

    def loss(self, logits: Tensor, *targets: Tensor) -> Tensor:
        """A mean over tokens."""
        return F.cross_entropy(logits.flatten(0, 1), targets[0].flatten())


class Texts(Model):
    """Texts of unequal length: what a device has to do follows from which it gets."""

    def inputs(self, batch: Any) -> tuple[Tensor, ...]:
        """Padded texts and their lengths."""
        return batch["texts"], batch["lengths"]

    targets = inputs

    def sample_cost(self, batch: Any) -> Tensor:
        """What `split="cost"` asks."""
        lengths: Tensor = batch["lengths"]
        return lengths

    def loss(self, logits: Tensor, *targets: Tensor) -> Tensor:
        """A mean over tokens."""
        texts, lengths = targets
        columns = torch.arange(texts.shape[1], device=texts.device)
        return F.cross_entropy(logits, texts[columns < lengths.unsqueeze(1)])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """A mean over tokens, of which each device has another number."""
        logits = self(*self.inputs(batch))
        return {"loss": self.loss(logits, *self.targets(batch)), "num_items": len(logits)}


class GAN(LightningModule):
    """Two optimizers, stepped by hand, one after another in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nets.mlp(LATENT, 512, 512, PIXELS)
        self.critic = nets.mlp(PIXELS, 512, 512, 1)

    def configure_optimizers(self) -> Any:
        """One for each of the two."""
        parts = self.generator, self.critic
        return [torch.optim.Adam(part.parameters(), 2e-4, betas=(0.5, 0.999)) for part in parts]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """The critic's step, then the generator's."""
        for_generator, for_critic = self.optimizers()
        images, noise = batch

        self.toggle_optimizer(for_critic)
        loss = self.critic_loss(self.critic, images, self.generator(noise).detach())
        for_critic.zero_grad()
        self.manual_backward(loss)
        for_critic.step()
        self.untoggle_optimizer(for_critic)

        self.toggle_optimizer(for_generator)
        generator_loss = F.softplus(-self.critic(self.generator(noise))).mean()
        for_generator.zero_grad()
        self.manual_backward(generator_loss)
        for_generator.step()
        self.untoggle_optimizer(for_generator)
        return {"loss": loss.detach()}

    @staticmethod
    def critic_loss(critic: Callable[[Tensor], Tensor], images: Tensor, drawn: Tensor) -> Tensor:
        """Both in one call: DDP takes one forward for each backward."""
        # Drawn images sit beside real ones, so that any part of the rows has as many of both.
        pairs = torch.stack([images, drawn], 1)
        judged = critic(pairs)
        return F.softplus(-judged[:, 0]).mean() + F.softplus(judged[:, 1]).mean()

    def parts(self) -> list[nn.Module]:
        """The modules that a loop wraps."""
        return [self.generator, self.critic]

    def loop_step(
        self,
        spread: Spread,
        inputs: Any,
        batch: Any,
        optimizers: Sequence[torch.optim.Optimizer],
        backward: Callable[[Tensor], Any],
    ) -> Tensor:
        """The same in plain PyTorch; see `Model.loop_step`."""
        for_generator, for_critic = optimizers
        images, noise = batch[0], inputs[1]
        generator, critic = spread(self.generator), spread(self.critic)
        with torch.no_grad():
            drawn = generator(noise)
        loss = self.critic_loss(critic, images, drawn)
        for_critic.zero_grad()
        backward(loss)
        for_critic.step()

        self.critic.requires_grad_(False)
        drawn = generator(noise)
        judged = spread(self.critic, trained=False)(drawn)
        generator_loss = F.softplus(-judged).mean()
        for_generator.zero_grad()
        backward(generator_loss)
        for_generator.step()
        self.critic.requires_grad_(True)
        return loss.detach()


@dataclass(frozen=True)
class Workload:
    """A model and its batches.

    Args:
        make: makes the model.
        batch: makes a batch of so many samples.
        samples: in a batch.
        about: what it is the worst case of.
        splits: of ours that make a difference, beside the one that was asked for.
        strategy: options of ours that the model needs.
    """

    make: Callable[[], LightningModule]
    batch: Callable[[int, torch.Generator], Any]
    samples: int
    about: str
    splits: tuple[str, ...] = ()
    strategy: Mapping[str, Any] = field(default_factory=dict)

    def batches(self, samples: int | None = None, seed: int = 0) -> list[Any]:
        """Some batches, always the same ones."""
        generator = torch.Generator().manual_seed(seed)
        return [self.batch(samples or self.samples, generator) for _ in range(BATCHES)]


def _images(n: int, generator: torch.Generator, size: int = 32) -> Any:
    x = torch.randn(n, 3, size, size, generator=generator)
    return x, torch.randint(CLASSES, (n,), generator=generator)


def _vectors(n: int, generator: torch.Generator) -> Any:
    x = torch.randn(n, 16, generator=generator)
    return x, torch.randint(CLASSES, (n,), generator=generator)


def _wide_vectors(n: int, generator: torch.Generator) -> Any:
    x = torch.randn(n, 1024, generator=generator)
    return x, torch.randint(CLASSES, (n,), generator=generator)


def _labelled_tokens(n: int, generator: torch.Generator) -> Any:
    x = torch.randint(TOKENS, (n, LENGTH), generator=generator)
    return x, torch.randint(CLASSES, (n,), generator=generator)


def _tokens(n: int, generator: torch.Generator) -> Any:
    x = torch.randint(LARGE_VOCABULARY, (n, LENGTH + 1), generator=generator)
    return x[:, :-1].contiguous(), x[:, 1:].contiguous()


def _texts(n: int, generator: torch.Generator) -> Any:
    """Most are short, and the longest ones come together, as where data are sorted."""
    u = torch.rand(n, generator=generator).sort().values
    lengths = (4 + (LONGEST - 4) * u**3).long()
    texts = torch.randint(TOKENS, (n, int(lengths.max())), generator=generator)
    return {"texts": texts, "lengths": lengths}


def _pairs(n: int, generator: torch.Generator) -> Any:
    images = torch.randn(n, PIXELS, generator=generator)
    return images, torch.randn(n, LATENT, generator=generator)


WORKLOADS = {
    "convnet": Workload(lambda: Model(nets.convnet()), _images, 64, "bound by computing"),
    "transformer": Workload(
        lambda: Model(nets.Transformer(TOKENS, CLASSES, 128, 3, LENGTH, causal=False)),
        _labelled_tokens,
        32,
        "bound by computing",
    ),
    "language_model": Workload(
        lambda: LanguageModel(
            nets.Transformer(LARGE_VOCABULARY, LARGE_VOCABULARY, 128, 2, LENGTH, causal=True)
        ),
        _tokens,
        16,
        "large outputs, large gradients",
    ),
    "wide": Workload(
        lambda: Wide(nets.plain_mlp(24, 1024)), _wide_vectors, 64, "large gradients, few operations"
    ),
    "mlp": Workload(lambda: Model(nets.plain_mlp(60, 16)), _vectors, 32, "bound by Python"),
    "resnet": Workload(
        lambda: Model(nets.TinyResNet50()),
        lambda n, generator: _images(n, generator, 8),
        32,
        "bound by Python, with batch norm",
    ),
    "gan": Workload(
        GAN,
        _pairs,
        64,
        "manual optimisation",
        strategy={"mode": "forward", "parallel_modules": ["generator", "critic"]},
    ),
    "texts": Workload(
        lambda: Texts(nets.TextNet(TOKENS, 96, 6)), _texts, 32, "unequal samples", ("cost",)
    ),
}
"""By their names."""

VIRTUAL = {
    "even_layers": Workload(
        lambda: Wide(nets.EvenLayers()), _wide_vectors, 2, "as many bytes as a ResNet-50, in time"
    ),
}
"""Those that compute nothing: only on virtual time do they take any."""


def workload(name: str) -> Workload:
    """The workload of a name."""
    return (WORKLOADS | VIRTUAL)[name]
