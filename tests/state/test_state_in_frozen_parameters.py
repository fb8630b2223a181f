"""A parameter that is not trained, and that a step writes to with what it has of its samples."""

from __future__ import annotations

import copy
import warnings
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


class Bound(Codebook):
    def move(self, mean: Tensor) -> None:
        self.own.centre.data = 0.9 * self.own.centre.data + 0.1 * mean


@pytest.mark.parametrize("made", [Codebook, Bound], ids=lambda made: made.__name__)
@pytest.mark.parametrize("devices", [2, 3])
def test_what_replicas_leave_different_is_told_once(made: type[Codebook], devices: int) -> None:
    words = r"leaves parameters different on the replicas \(own\.centre\)"
    with pytest.warns(UserWarning, match=words) as told:
        trainer(devices, max_epochs=2).fit(made(), loader())
    assert sum("leaves parameters" in str(each.message) for each in told) == 1


class Teacher(Codebook):
    """Averages weights, which are the same on every replica."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    @torch.no_grad()
    def move(self, mean: Tensor) -> None:
        for own, student in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            own.mul_(0.9).add_(student, alpha=0.1)


class Freezing(Codebook):
    """A part of it is frozen in some steps, and trained in others."""

    def move(self, mean: Tensor) -> None:
        self.net[0].requires_grad_(self.global_step % 2 == 0)


@pytest.mark.parametrize("made", [Teacher, Freezing], ids=lambda made: made.__name__)
@pytest.mark.parametrize("devices", [2, 3])
def test_what_is_the_same_everywhere_is_not(made: type[Codebook], devices: int) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="A step leaves")
        results = [fitted(made, number) for number in (devices, 1)]
    assert_equal_trees(*results, "parameters", atol=1e-5, rtol=1e-4)


def fitted(made: type[Codebook], devices: int) -> Any:
    torch.manual_seed(0)
    module = made()
    trainer(devices).fit(module, loader())
    return dict(module.named_parameters())
