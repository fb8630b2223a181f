"""A parameter that is not trained, and that a step writes to with what it has of its samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import Classifier, assert_equal_trees, loader, trainer
from torch import Tensor, nn
from torch.nn import functional as F

pytestmark = pytest.mark.usefixtures("on", "one_thread")


class Codebook(Classifier):
    """Its centre moves with the batches."""

    validation_step = None

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Module()
        self.own.centre = nn.Parameter(torch.zeros(10), requires_grad=False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        self.move(x.mean(0))
        return F.cross_entropy(self.net(x - self.own.centre), y)

    def move(self, mean: Tensor) -> None:
        self.own.centre.mul_(0.9).add_(mean, alpha=0.1)


class Freezing(Codebook):
    """A part of it is frozen in some steps, and trained in others."""

    def move(self, mean: Tensor) -> None:
        self.net[0].requires_grad_(self.global_step % 2 == 0)


@pytest.mark.parametrize("devices", [2, 3])
def test_a_part_that_is_frozen_in_some_steps(devices: int) -> None:
    results = [fitted(Freezing, number) for number in (devices, 1)]
    assert_equal_trees(*results, "parameters", atol=1e-5, rtol=1e-4)


def fitted(made: type[Codebook], devices: int) -> Any:
    torch.manual_seed(0)
    module = made()
    trainer(devices).fit(module, loader())
    return dict(module.named_parameters())
