"""Private names of torch, of losses: each does what we take it for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_dp.parallel.torch_losses import divisors_of_means

CLASSES = torch.tensor([0, 1, 1, 2])
WEIGHT = torch.tensor([1.0, 5.0, 0.5])


@pytest.fixture
def scores() -> Tensor:
    return torch.randn(4, 3, requires_grad=True)


def test_saved_total_weight_is_the_sum_of_the_weights_of_the_targets(scores: Tensor) -> None:
    plain, weighted, ignoring = (
        divisors_of_means(F.cross_entropy(scores, CLASSES)),
        divisors_of_means(F.nll_loss(scores.log_softmax(1), CLASSES, WEIGHT)),
        divisors_of_means(F.cross_entropy(scores, CLASSES, WEIGHT, ignore_index=1)),
    )
    assert [float(*found) for found in (plain, weighted, ignoring)] == [4.0, 11.5, 1.5]


def test_images_have_one_for_all_pixels() -> None:
    scores = torch.randn(2, 3, 2, 2, requires_grad=True)
    classes = torch.tensor([[[0, 1], [1, 1]], [[2, 2], [-100, 0]]])
    assert float(*divisors_of_means(F.cross_entropy(scores, classes))) == 7.0


def test_saved_reduction_tells_means_which_are_all_found_and_nothing_else(scores: Tensor) -> None:
    means = [F.cross_entropy(scores, CLASSES, WEIGHT), F.cross_entropy(scores * 2, CLASSES)]
    sums = [F.cross_entropy(scores, CLASSES, reduction="sum"), scores.square().mean()]
    own = F.cross_entropy(scores, CLASSES, reduction="none").mean()
    found = divisors_of_means(sum(means) + sum(sums) + own)
    assert sorted(map(float, found)) == [4.0, 11.5]


def test_a_loss_without_a_graph_has_none() -> None:
    assert divisors_of_means(torch.tensor(1.0)) == []


def test_a_graph_that_is_deep_is_no_recursion(scores: Tensor) -> None:
    deep = scores
    for _ in range(5000):
        deep = deep + 1
    assert float(*divisors_of_means(F.cross_entropy(deep, CLASSES))) == 4.0
