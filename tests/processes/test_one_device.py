"""Modules whose training in several processes is one device's: weights, metrics, predictions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import Case, assert_as_on_one_device
from support.oracle import Classifier
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:`training_step` returned `None`")


class Sometimes(Classifier):
    """One layer is used for few samples, one for none; a parameter is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.rare, self.unused = nn.Linear(10, 3), nn.Linear(10, 3)
        self.net[0].bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        chosen = (x[:, 0] > 1.2).nonzero().squeeze(1)
        logits = self.net(x)
        return logits.index_add(0, chosen, self.rare(x[chosen])) if len(chosen) else logits


class Tokens(Classifier):
    """The loss is a mean over few samples, in some shards over none: there it is NaN."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        valid = x[:, 0] > 0.8
        losses = F.cross_entropy(self(x), y, reduction="none")
        return {"loss": losses[valid].mean(), "num_items": valid.sum(), "pred": self(x).detach()}


class Summed(Classifier):
    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1], reduction="sum") / 50

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.loss(batch), reduce_fx="sum")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test/loss", self.loss(batch), reduce_fx="sum")


class ManySteps(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4)


class OneCycle(Classifier):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Checkpointed(Classifier):
    """What is in the checkpoint gets gradients twice in a backward."""

    def forward(self, x: Tensor) -> Any:
        if not self.training:
            return self.net(x) + self.net(x * 0.5)
        x = x.requires_grad_()
        return sum(checkpoint(self.net, y, use_reentrant=True) for y in (x, x * 0.5))


class KeepsGradients(Classifier):
    """Gradients are cleared after every second step, and a backward is called twice."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2:
            super().optimizer_zero_grad(epoch, batch_idx, optimizer)

    def backward(self, loss: Tensor) -> None:
        loss.backward(retain_graph=True)
        loss.backward()


class Hooked(Classifier):
    """Hooks of parameters see the gradient of the whole batch, in every backward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(2))
        self.net[2].weight.register_hook(self.double_gradient)
        self.net[0].bias.register_post_accumulate_grad_hook(self.note)

    def double_gradient(self, gradient: Tensor) -> Tensor:
        self.seen[0] += gradient.square().sum()
        return 2 * gradient

    def note(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.seen[1] += parameter.grad.square().sum()


class EveryThird(Classifier):
    """All processes have no loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx % 3 == 1 else self.loss(batch)


class Late(Classifier):
    """Only samples with a large first number count; often a shard has none, and no loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        kept = x[:, 0] > 1
        loss = F.cross_entropy(self(x[kept]), y[kept])
        return {"loss": loss, "num_items": int(kept.sum())} if kept.any() else None


ACCUMULATING = {"accumulate_grad_batches": 2}

CASES = [
    *(Case(Classifier), Case(Classifier, {}, {"accumulate_grad_batches": 3}), Case(Sometimes)),
    *(Case(Tokens), Case(Summed, {"loss_reduction": "sum"}), Case(ManySteps, tolerance=1e-7)),
    *(Case(OneCycle), Case(Classifier, {}, {"gradient_clip_val": 0.1}), Case(KeepsGradients)),
    *(Case(Checkpointed), Case(Hooked), Case(EveryThird, {}, ACCUMULATING), Case(Late)),
]


@pytest.mark.parametrize(
    ("processes", "devices", "samples"),
    [(2, 4, 51), *(pytest.param(*n, marks=pytest.mark.slow) for n in [(2, 2, 53), (4, 4, 51)])],
)
def test_the_numbers_are_those_of_one_device(processes: int, devices: int, samples: int) -> None:
    assert_as_on_one_device(CASES, processes, devices, samples)
