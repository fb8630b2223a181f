"""Numbers that steps log: those that are no means over samples are told, and no others."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchmetrics
from oracle import ByHand, Classifier, loader, run
from torch import Tensor
from torch.nn import functional as F

pytestmark = pytest.mark.usefixtures("one_thread")

TOLD = "expected numbers for self.log that are means over samples, got "
Number = Callable[[Tensor, Tensor], Any]


def _one_hot(y: Tensor) -> Tensor:
    return F.one_hot(y, 3).float()


def _error(z: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(z, _one_hot(y))


def _right(z: Tensor, y: Tensor) -> Tensor:
    return z.argmax(1) == y


def _overlap(own: Tensor, right: Tensor) -> Tensor:
    return (own & right).sum() / (own | right).sum().clamp(min=1)


MEANS: dict[str, Number] = {
    "loss": F.cross_entropy,
    "accuracy": lambda z, y: _right(z, y).float().mean(),
    "share": lambda z, y: _right(z, y).sum() / len(y),
    "count of all": lambda z, y: _right(z, y).sum() / torch.ones_like(y).sum(),
    "sum by length": lambda z, y: z.square().sum() / z.numel(),
    "of each": lambda z, y: z.norm(dim=1).mean() + z.std(1).exp().mean(),
    "largest of each": lambda z, y: z.softmax(1).amax(1).mean(),
    "scaled": lambda z, y: 0.5 * _error(z, y) - 2 * z.mean() / 3 + 1,
    "item": lambda z, y: _error(z, y).item(),
    "detached": lambda z, y: _error(z, y).detach().cpu().float().unsqueeze(0),
    "per class": lambda z, y: z.mean(0).sum(),
    "stack": lambda z, y: torch.stack([_error(z, y), z.mean()]).mean(),
    "constant": lambda z, y: torch.tensor(3.0).sqrt(),
    "a number": lambda z, y: 0.1,
    "by the same in all": lambda z, y: z.mean() / (2 * torch.ones_like(y).max()),
    "the same in all": lambda z, y: torch.ones_like(y).max().sqrt(),
    "classes that all count": lambda z, y: F.cross_entropy(z, y, z.new_full((3,), 0.5)),
    "probabilities": lambda z, y: F.cross_entropy(z, _one_hot(y)),
    "functional": lambda z, y: torchmetrics.functional.accuracy(
        z, y, task="multiclass", num_classes=3
    ),
}
OTHERS: dict[str, tuple[Number, str]] = {
    "root": (lambda z, y: _error(z, y).sqrt(), "sqrt of mse_loss over samples"),
    "root of a mean": (lambda z, y: torch.sqrt((z - 1).square().mean()), "sqrt of mean over "),
    "root as an item": (lambda z, y: _error(z, y).sqrt().item(), "sqrt of mse_loss over "),
    "power": (lambda z, y: z.square().mean() ** 0.5, "a power of mean over samples"),
    "perplexity": (lambda z, y: F.cross_entropy(z, y).exp(), "exp of cross_entropy over samples"),
    "decibels": (lambda z, y: 10 * torch.log10(1 / _error(z, y)), "1 / x of mse_loss over "),
    "largest": (lambda z, y: z.max(), "max over samples"),
    "largest by 2": (lambda z, y: 2 * z.amax(0).mean(), "amax over samples"),
    "deviation": (lambda z, y: z.std(), "std over samples"),
    "norm": (lambda z, y: z.norm(), "norm over samples"),
    "ratio": (lambda z, y: (z[:, 0] * (y > 0)).sum() / (y > 0).sum(), "a ratio of sum and sum "),
    "overlap": (lambda z, y: _overlap(z.argmax(1) == 1, y == 1), "a ratio of sum and sum over "),
    "picked": (lambda z, y: z[y > 0].mean(), "mean over some samples"),
    "product": (lambda z, y: z.mean() * z.square().mean(), "a product of mean and mean over "),
    "weights of classes": (
        lambda z, y: F.cross_entropy(z, y, z.new_tensor([1.0, 5.0, 0.2])),
        "cross_entropy over weights of targets",
    ),
    "ignored": (
        lambda z, y: F.nll_loss(z, y, ignore_index=1),
        "nll_loss over weights of targets",
    ),
    "sum of losses": (lambda z, y: F.mse_loss(z, _one_hot(y), reduction="sum"), "a sum over "),
    "some of them": (lambda z, y: F.l1_loss(z[y > 0], _one_hot(y)[y > 0]), "l1_loss over some "),
    "sum": (lambda z, y: z.abs().sum(), "a sum over samples"),
    "right ones": (lambda z, y: _right(z, y).sum().float(), "a sum over samples"),
    "mean by length": (lambda z, y: z.abs().mean() * len(z), "a sum over samples"),
    "samples": (lambda z, y: float(len(z)), "the number of samples"),
}


def logging(number: Number, *bases: type, **options: Any) -> Any:
    """Logs a number of each batch, in training and in evaluation."""

    class Logging(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            z = self(batch[0])
            self.log("own", number(z, batch[1]), **options)
            return F.cross_entropy(z, batch[1])

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val/own", number(self(batch[0]), batch[1]), **options)

    return type("Logging", (*bases, Logging), {})


def logged(ran: Any) -> Tensor:
    return torch.tensor([float(ran.callback_metrics[name]) for name in ("own", "val/own")])


@pytest.mark.usefixtures("on")
@pytest.mark.parametrize("name", MEANS)
def test_means_over_samples_are_as_on_one_device_and_are_not_told(name: str) -> None:
    make = logging(MEANS[name])
    torch.testing.assert_close(logged(run(make, 3)), logged(run(make, 1)))


@pytest.mark.usefixtures("on")
@pytest.mark.parametrize("name", OTHERS)
def test_other_numbers_are_told_once_for_each_step_and_are_not_as_on_one_device(name: str) -> None:
    number, text = OTHERS[name]
    make = logging(number)
    with pytest.warns(UserWarning, match=TOLD) as records:
        several = logged(run(make, 3))
    told = [str(record.message) for record in records if TOLD in str(record.message)]
    assert {message.split(":")[0] for message in told} == {"training_step", "validation_step"}
    assert all(text in message and "own'" in message for message in told)
    assert not torch.allclose(several, logged(run(make, 1)))


def test_later_looks_tell_nothing_twice() -> None:
    make = logging(OTHERS["deviation"][0])
    with pytest.warns(UserWarning, match=TOLD) as records:
        run(make, 3, data=lambda: loader(500, 25))  # of 40 batches the first and the 16th
    assert sum("training_step: " + TOLD in str(record.message) for record in records) == 1


def test_in_manual_optimisation_too() -> None:
    with pytest.warns(UserWarning, match=TOLD + "std over samples") as records:
        run(logging(OTHERS["deviation"][0], ByHand), 3)
    assert any(str(record.message).startswith("training_step") for record in records)


def test_sums_that_are_added_up_are_as_on_one_device_and_means_are_told() -> None:
    make = logging(OTHERS["sum"][0], reduce_fx="sum")
    torch.testing.assert_close(logged(run(make, 3)), logged(run(make, 1)))
    make = logging(MEANS["accuracy"], reduce_fx=torch.sum)
    with pytest.warns(UserWarning, match=TOLD + "a mean over samples as"):
        several = logged(run(make, 3))
    assert not torch.allclose(several, logged(run(make, 1)))


def test_what_is_the_same_in_each_shard_is_told_where_sums_are_added_up() -> None:
    make = logging(lambda z, y: 1.0, reduce_fx="sum")
    with pytest.warns(UserWarning, match=TOLD + "what is the same in each shard as"):
        several = logged(run(make, 3))
    assert not torch.allclose(several, logged(run(make, 1)))
    make = logging(lambda z, y: float(len(z)), reduce_fx="sum")
    torch.testing.assert_close(logged(run(make, 3)), logged(run(make, 1)))


def test_the_largest_of_all_is_as_on_one_device() -> None:
    make = logging(OTHERS["largest"][0], reduce_fx="max")
    torch.testing.assert_close(logged(run(make, 3)), logged(run(make, 1)))


class OfItems(Classifier):
    """Logs means over some samples, and over how many."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        z, y = self(batch[0]), batch[1]
        counts = y > 0
        mean = (z[:, 0] * counts).sum() / counts.sum()
        self.log("val/own", mean, batch_size=int(counts.sum()))


def test_with_a_batch_size_a_number_is_a_mean_over_that_many() -> None:
    several, one = (run(OfItems, devices).callback_metrics["val/own"] for devices in (3, 1))
    torch.testing.assert_close(several, one)


@pytest.mark.parametrize("size", [len, lambda z: 25], ids=["samples", "a constant"])
def test_with_as_many_as_there_are_samples_it_is_told(size: Callable[[Tensor], int]) -> None:
    class Sized(Classifier):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val/own", self(batch[0]).std(), batch_size=size(batch[0]))

    with pytest.warns(UserWarning, match=TOLD + "std over samples as 'val/own'"):
        run(Sized, 3)


class Unknown(Classifier):
    """What the host or a function of one's own has made of it is not looked into."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/own", math.sqrt(_error(self(batch[0]), batch[1]).item()))


def test_what_the_host_computes_is_not_told() -> None:
    run(Unknown, 3)
