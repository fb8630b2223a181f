"""Forward mode, manual optimisation and steps without loss in several processes."""

from typing import Any

import pytest
import torch
from cases import Case, assert_as_on_one_device
from support.oracle import ByHand, Classifier
from test_forward_mode import contrastive, dice
from test_manual_optimisation import PARTS, Accumulating, Adversarial, Clamped, Clipping, Lbfgs
from torch import Tensor, nn
from torch.nn import functional as F

pytestmark = pytest.mark.filterwarnings("ignore:`training_step` returned `None`")


class Mixed(Classifier):
    """A parameter and a layer that the step uses outside of spread calls; one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.unused = nn.Linear(2, 2)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        z = self(x) * self.scale + self.net[0](x).mean(1, keepdim=True)
        return F.cross_entropy(z, y) + 0.1 * self.net[2].weight.square().sum()


class Masked(Classifier):
    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y, ignore_index=0)
        loss.num_items = (y != 0).sum()
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self(batch[0])

    test_step = validation_step


class Sums(Classifier):
    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1], reduction="sum") / 50

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train/loss", loss, reduce_fx="sum", on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.loss(batch), reduce_fx="sum")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test/loss", self.loss(batch), reduce_fx="sum")


class WholeBatch(Classifier):
    """Every sample against all others of the batch, in all processes."""

    def loss(self, batch: Any) -> Tensor:
        z, y = self.all_gather(self(batch[0]), sync_grads=True), self.all_gather(batch[1])
        return contrastive(z, y) + dice(z, y)


class WholeBatchByHand(ByHand, WholeBatch):
    pass


class Hooked(Classifier):
    """Hooks of parameters see the gradient of the whole batch, in every backward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(2))
        self.net[2].weight.register_hook(self.double)
        self.net[0].bias.register_post_accumulate_grad_hook(self.note)

    def double(self, gradient: Tensor) -> Tensor:
        self.seen[0] += gradient.square().sum()
        return 2 * gradient

    def note(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.seen[1] += parameter.grad.square().sum()


class KeepsGradients(Classifier):
    """Clears them in every second step alone."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2 == 0:
            super().optimizer_zero_grad(epoch, batch_idx, optimizer)


class ManyByHand(ByHand, Classifier):
    """Backwards of all kinds, and closures."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        loss = self.loss(batch)
        loss.backward(torch.tensor(-1.0).to(loss), retain_graph=True)
        (2 * loss).backward(inputs=list(self.net[2].parameters()))
        torch.autograd.backward([self.loss(batch), 2 * self.loss(batch)])
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()


class EveryThird(Classifier):
    """All processes have no loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx % 3 == 1 else self.loss(batch)


class Late(Classifier):
    """Of the samples' loss only those with a large first number count; often a shard has none.

    One device has the same loss: a mean over those that count.
    """

    least = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        kept = x[:, 0] > self.least
        if not kept.any():
            return None
        loss: Tensor = F.cross_entropy(self(x[kept]), y[kept])
        return {"loss": loss, "num_items": int(kept.sum())}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.5, momentum=0.9)


class Later(Late):
    """Whole batches have none."""

    least = 1.9


def case(make: Any, samples: int = 51, *, options: Any = None, **strategy: Any) -> Case:
    return Case(make, {"mode": "forward", **strategy}, options or {}, samples)


ACCUMULATING = {"accumulate_grad_batches": 2}

SOME = [
    case(Mixed, parallel_modules=["net"]),
    case(Mixed, options=ACCUMULATING, samples=78),
    case(Masked),
    case(WholeBatch),
    case(WholeBatchByHand),
    case(Hooked, options=ACCUMULATING),
    case(KeepsGradients, options={"gradient_clip_val": 0.01}),
    case(ManyByHand),
]
STATE_ALONE = [
    *(Case(Accumulating), Case(Lbfgs), Case(Clipping), Case(Clamped, PARTS)),
    *(Case(Late, samples=51), case(Late)),
]
"""Their metrics are the process's own."""
LATER = [
    Case(EveryThird, options=ACCUMULATING, samples=101),
    Case(Later, samples=76),
    case(Later, 76),
]
OTHERS = [
    case(Masked, 53, options=ACCUMULATING),
    case(Sums, loss_reduction="sum"),
    case(ManyByHand, 53),
    case(Adversarial, parallel_modules=["generator", "critic"]),
]


def test_the_numbers_are_those_of_one_device() -> None:
    assert_as_on_one_device([*SOME, *STATE_ALONE], without_metrics=STATE_ALONE)


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "devices"), [(2, 4), (4, 4)])
def test_each_of_them(processes: int, devices: int) -> None:
    alone = [*STATE_ALONE, *LATER]
    cases = [*SOME, *OTHERS, *alone]
    assert_as_on_one_device(cases, processes, devices, without_metrics=alone)
