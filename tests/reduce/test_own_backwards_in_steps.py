"""Backwards of the user's own in steps: their gradients are there and zeroed as on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.oracle import Classifier, assert_equal_trees, loader, trainer
from torch import Tensor
from torch.nn import functional as F

from lightning_dp import DataParallelStrategy

pytestmark = pytest.mark.usefixtures("on", "one_thread")


class Adversarial(Classifier):
    """Trains on inputs that a step of their gradient has made worse."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = x.clone().requires_grad_()
        F.cross_entropy(self(x), y, reduction="sum").backward()
        assert x.grad is not None
        return F.cross_entropy(self((x + 0.1 * x.grad.sign()).detach()), y)


class InPlace(Adversarial):
    """Gradients are zeroed in place."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class Validating(Classifier):
    """Leaves gradients in validation, which nobody zeroes: they go on into the next step."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        with torch.enable_grad():
            F.cross_entropy(self(batch[0]), batch[1], reduction="sum").backward()

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        return None


def fitted(make: type[Classifier], devices: int, executor: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    module = make()
    job = trainer(devices, DataParallelStrategy(executor=executor), max_epochs=1, **options)
    job.fit(module, loader(), loader())
    return {name: p.detach() for name, p in module.named_parameters()}, job.callback_metrics


@pytest.mark.parametrize(("executor", "accumulate"), [("threads", 2), ("inorder", 1)])
@pytest.mark.parametrize("make", [Adversarial, InPlace, Validating])
def test_a_fit_is_that_of_one_device(
    make: type[Classifier], accumulate: int, executor: Any
) -> None:
    options = {"accumulate_grad_batches": accumulate}
    several, one = fitted(make, 3, executor, **options), fitted(make, 1, "auto", **options)
    assert_equal_trees(several, one, "fit", atol=1e-5, rtol=1e-4)
