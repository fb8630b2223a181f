"""Forward mode in several processes: each runs the step, and one loss is of all samples."""

from typing import Any

import pytest
import torch
from cases import Case, assert_as_on_one_device
from oracle import ByHand, Classifier
from test_forward_mode import contrastive, dice
from test_manual_optimisation import Adversarial, Penalised
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


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


class MaskedMapping(Masked):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return {"loss": loss, "num_items": int(loss.num_items), "of": "this process"}


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


class Recomputing(Classifier):
    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(checkpoint(self, x.requires_grad_(), use_reentrant=True), y)


class KeepsGradients(Classifier):
    """Clears them in every second step alone."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2 == 0:
            super().optimizer_zero_grad(epoch, batch_idx, optimizer)


class Lbfgs(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4)


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


class LbfgsByHand(ByHand, Lbfgs):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure)


def case(make: Any, samples: int = 51, *, options: Any = None, **strategy: Any) -> Case:
    return Case(make, {"mode": "forward", **strategy}, options or {}, samples)


ACCUMULATING = {"accumulate_grad_batches": 2}
BOTH = ["generator", "critic"]

SOME = [
    case(Mixed, parallel_modules=["net"]),
    case(Mixed, options=ACCUMULATING, samples=78),
    case(Masked),
    case(MaskedMapping),
    case(WholeBatch),
    case(WholeBatchByHand),
    case(Hooked, options=ACCUMULATING),
    case(KeepsGradients, options={"gradient_clip_val": 0.01}),
    case(ManyByHand),
    case(LbfgsByHand),
]
OTHERS = [
    case(Mixed, 53),
    case(Masked, 53, options=ACCUMULATING),
    case(Sums, loss_reduction="sum"),
    case(Hooked),
    case(KeepsGradients, 78, options=ACCUMULATING),
    case(Recomputing),
    case(Lbfgs),
    case(ManyByHand, 53),
    case(Adversarial, parallel_modules=BOTH),
    case(Penalised, 53, parallel_modules=BOTH),
]


def test_the_numbers_are_those_of_one_device() -> None:
    assert_as_on_one_device(SOME)


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "devices"), [(2, 2), (2, 4), (4, 4)])
def test_each_of_them(processes: int, devices: int) -> None:
    assert_as_on_one_device([*SOME, *OTHERS], processes, devices)
