"""Training steps that return None, in some processes or in all: their samples are left out."""

from typing import Any

import pytest
import torch
from cases import Case, assert_as_on_one_device
from oracle import Classifier
from torch import Tensor
from torch.nn import functional as F

pytestmark = pytest.mark.filterwarnings("ignore:`training_step` returned `None`")


class EveryThird(Classifier):
    """All processes."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx % 3 == 1 else self.loss(batch)


class AsMapping(EveryThird):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if loss is None else {"loss": loss}


class Always(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None


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


CASES = [
    Case(EveryThird, samples=78),
    Case(EveryThird, options={"accumulate_grad_batches": 2}, samples=101),
    Case(AsMapping),
    Case(Always),
    Case(Late, samples=51),
    Case(Later, samples=76),
]


@pytest.mark.slow
def test_in_step_mode() -> None:
    assert_as_on_one_device(CASES, metrics=False)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_with_one_device_each(processes: int) -> None:
    assert_as_on_one_device(CASES, processes, processes, metrics=False)


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "devices"), [(2, 4), (4, 4)])
def test_in_forward_mode(processes: int, devices: int) -> None:
    cases = [Case(c.make, {"mode": "forward"}, c.options, c.samples) for c in CASES]
    assert_as_on_one_device(cases, processes, devices, metrics=False)
