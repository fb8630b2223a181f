"""A cross entropy that is a mean over something else than samples is told, and only that."""

from __future__ import annotations

import warnings
from contextlib import closing
from typing import Any

import pytest
import torch
from oracle import ByHand, Classifier, assert_same, devices_of, run
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dp.parallel.gradients.own_means import LOOKS
from lightning_dp.parallel.step import StepParallel

pytestmark = pytest.mark.usefixtures("on", "one_thread")

WEIGHT = [1.0, 7.0, 0.3]
TOLD = "expected a loss that is a mean over samples, got a cross entropy"


class Weighted(Classifier):
    """Its classes weigh differently, and it may say what its loss is a mean over."""

    tells = False

    def loss(self, batch: Any) -> Any:
        x, y = batch
        weight = torch.tensor(WEIGHT, device=x.device)
        loss: Any = F.cross_entropy(self(x), y, weight)
        if self.tells and self.trainer.training:
            loss.num_items = weight[y].sum()
        return loss

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Logs weigh by batch_size, which is not of interest here."""


class WeightedByHand(ByHand, Weighted):
    pass


def trained(make: Any, devices: int, told: bool, **strategy: Any) -> Any:
    made = type(make.__name__, (make,), {"tells": told})
    return run(made, devices, strategy=strategy)


@pytest.mark.parametrize("executor", ["threads", "inorder"])
@pytest.mark.parametrize("make", [Weighted, WeightedByHand])
def test_class_weights_are_told_and_with_their_sum_are_as_on_one_device(
    make: Any, executor: str, on: str
) -> None:
    with pytest.warns(UserWarning, match=TOLD) as records:
        trained(make, 3, told=False, executor=executor)
    assert sum(TOLD in str(record.message) for record in records) == 1
    expected = trained(make, 1, told=False)
    assert_same(trained(make, 3, told=True, executor=executor), expected, atol=1e-5)
    assert_same(trained(make, 3, told=False, mode="forward"), expected, atol=1e-5)


class Net(nn.Linear):
    """Its loss has the options that a test gives."""

    def __init__(self, weights: list[float] | None = None, **options: Any) -> None:
        super().__init__(4, 3)
        self.options = options
        self.register_buffer("weights", None if weights is None else torch.tensor(weights))

    def training_step(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y, self.weights, **self.options)


BATCH = torch.randn(6, 4), torch.tensor([0, 0, 1, 2, 1, 1])
WITH_PADDING = torch.randn(4, 5, 4), torch.tensor([[0, 1, 2, 1, 0], [1, 1, -100, -100, -100]] * 2)


def messages(net: Net, batch: Any, count: int = 1, **options: Any) -> list[str]:
    """What is told in so many steps."""
    devices = devices_of(2)
    net, batch = net.to(devices[0]), [part.to(devices[0]) for part in batch]
    own = {"output_device": devices[0], "split": lambda n: (n - n // 2, n // 2)}
    engine = StepParallel(net, devices, **own, **options)
    with closing(engine), warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        for _ in range(count):
            engine.train("training_step", batch).backward()
    return [str(record.message) for record in records if TOLD in str(record.message)]


class Sequences(Net):
    def training_step(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x).transpose(1, 2), y)


def test_the_numbers_are_told() -> None:
    """The first batch is cut unequally, whatever the split."""
    [told] = messages(Net(WEIGHT), BATCH, count=3)
    assert told.startswith("training_step: ") and ": 9.3, 14 in shards of 4, 2 samples." in told


@pytest.mark.parametrize(("rows", "is_told"), [([0, 1], True), ([0, 2], False), ([1, 3], False)])
def test_ignored_targets_are_told_where_shards_have_more_or_fewer(
    rows: list[int], is_told: bool
) -> None:
    assert bool(messages(Sequences(), [part[rows] for part in WITH_PADDING])) == is_told


@pytest.mark.parametrize(
    "options",
    [{}, {"label_smoothing": 0.1}, {"weights": [2.0, 2.0, 2.0]}],
    ids=str,
)
def test_means_over_samples_are_not_told(options: dict[str, Any]) -> None:
    assert not messages(Net(**options), BATCH)


def test_sums_and_what_has_said_its_items_are_not_told() -> None:
    class Telling(Net):
        def training_step(self, batch: Any) -> Any:
            loss: Any = super().training_step(batch)
            loss.num_items = self.weights[batch[1]].sum()
            return loss

    assert not messages(Telling(WEIGHT), BATCH)
    assert not messages(Net(WEIGHT), BATCH, loss_reduction="sum")
    assert not messages(Net(WEIGHT, reduction="sum"), BATCH, loss_reduction="sum")


def test_only_the_first_batches_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    monkeypatch.setattr(
        "lightning_dp.parallel.gradients.own_means.divisors_of_means",
        lambda loss: looks.append(1) or [],
    )
    assert not messages(Net(), BATCH, count=LOOKS + 3)
    assert len(looks) == 2 * LOOKS
