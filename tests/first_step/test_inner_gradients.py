"""Gradients of a mean that a step takes itself are told where their scale counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import Classifier, assert_same, run
from test_meeting_samples import whole
from test_relations import check_that_a_fit_is_told, traced
from torch import Tensor
from torch.nn import functional as F

from lightning_dp.parallel.additive.inner_gradients import scaled_gradient

pytestmark = pytest.mark.usefixtures("one_thread")


class Inner(Classifier):
    """A loss that takes gradients with respect to the samples."""

    def of(self, x: Tensor, y: Tensor) -> Tensor:
        raise NotImplementedError

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return self.of(x.clone().requires_grad_(), y) if self.training else super().loss(batch)


def inner(step: Callable[[Any, Tensor, Tensor], Tensor]) -> Any:
    return type("Inner", (Inner,), {"of": step})


def gradient(value: Tensor, x: Tensor, **options: Any) -> Tensor:
    return torch.autograd.grad(value, x, **options)[0]


def attack(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return gradient(F.cross_entropy(self(x), y), x)


def penalty(self: Any, x: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    return gradient(reduce(self(x)), x, create_graph=True)


Step = Callable[[Any, Tensor, Tensor], Tensor]
OF_MEANS: dict[str, tuple[Step, str]] = {
    "attack": (
        lambda self, x, y: F.cross_entropy(self(x + attack(self, x, y)), y),
        "add of a gradient of cross_entropy over samples",
    ),
    "penalty": (
        lambda self, x, y: (
            F.cross_entropy(self(x), y)
            + (penalty(self, x, torch.mean).norm(dim=1) - 1).square().mean()
        ),
        "sub of a gradient of mean over samples",
    ),
    "added to a loss": (
        lambda self, x, y: (
            F.cross_entropy(self(x), y) + penalty(self, x, torch.mean).square().sum(1).mean()
        ),
        "add of a gradient of mean over samples",
    ),
    "alone": (
        lambda self, x, y: penalty(self, x, torch.mean).square().sum(1).mean(),
        "a gradient of mean over samples",
    ),
    "function": (
        lambda self, x, y: penalty(self, x, torch.mean).sum(1).tanh().mean(),
        "tanh of a gradient of mean over samples",
    ),
    "equation": (
        lambda self, x, y: (penalty(self, x, torch.mean)[:, 0] - x[:, 1]).square().mean(),
        "sub of a gradient of mean over samples",
    ),
}


@pytest.mark.usefixtures("on")
@pytest.mark.parametrize("name", OF_MEANS)
def test_a_gradient_of_a_mean_is_told_once_and_is_not_one_devices(name: str) -> None:
    step, text = OF_MEANS[name]
    check_that_a_fit_is_told(inner(step), f"got {text}. What")


OF_SUMS: dict[str, Step] = {
    "penalty": lambda self, x, y: (
        F.cross_entropy(self(x), y) + (penalty(self, x, torch.sum).norm(dim=1) - 1).square().mean()
    ),
    "of each": lambda self, x, y: (
        (gradient(z := self(x), x, grad_outputs=torch.ones_like(z), create_graph=True) - 1)
        .square()
        .mean()
    ),
    "sign": lambda self, x, y: F.cross_entropy(self(x + 0.1 * attack(self, x, y).sign()), y),
    "normalised": lambda self, x, y: F.cross_entropy(
        self(x + F.normalize(attack(self, x, y), dim=1)), y
    ),
    "over its norm": lambda self, x, y: F.cross_entropy(
        self(x + (g := attack(self, x, y)) / (g.norm(dim=1, keepdim=True) + 1e-9)), y
    ),
    "over its largest": lambda self, x, y: F.cross_entropy(
        self(x + (g := attack(self, x, y)) / g.abs().amax(1, keepdim=True).clamp(min=1e-9)), y
    ),
    "over its root": lambda self, x, y: F.cross_entropy(
        self(x + (g := attack(self, x, y)) * g.square().sum(1, keepdim=True).rsqrt()), y
    ),
    "times their number": lambda self, x, y: F.cross_entropy(
        self(x + 0.1 * len(x) * attack(self, x, y)), y
    ),
    "sum of the loss": lambda self, x, y: F.cross_entropy(
        self(x + 0.1 * gradient(F.cross_entropy(self(x), y, reduction="sum"), x)), y
    ),
}


@pytest.mark.usefixtures("on")
@pytest.mark.parametrize("name", OF_SUMS)
def test_a_gradient_whose_scale_does_not_count_is_as_on_one_device_and_is_not_told(
    name: str,
) -> None:
    make = inner(OF_SUMS[name])
    assert_same(run(make, 3), run(make, 1), atol=1e-4)


@pytest.mark.usefixtures("on")
@pytest.mark.parametrize("name", ["attack", "penalty"])
def test_what_it_advises_is_as_on_one_device(name: str) -> None:
    make = inner(OF_MEANS[name][0])
    assert_same(run(make, 3, strategy={"mode": "forward"}), run(make, 1), atol=1e-5)


def told(step: Callable[[Tensor], Tensor], sizes: tuple[int, ...] = (3, 2)) -> str | None:
    torch.manual_seed(0)
    shards = torch.randn(sum(sizes), 4).split(list(sizes))
    pairs = [traced(step, shard.clone().requires_grad_()) for shard in shards]
    return scaled_gradient(*zip(*pairs, strict=True), sizes)


SCALES: dict[str, Callable[[Tensor], Tensor]] = {
    "of itself": lambda g: g,
    "products": lambda g: g * g,
    "ratios": lambda g: g / g.square(),
    "inverses": lambda g: 1 / g,
    "powers": lambda g: g.abs() ** 3,
    "roots of squares": lambda g: g.square().sqrt(),
    "side by side": lambda g: torch.cat([g, g.abs()]),
    "with samples": lambda g: g @ torch.ones(4, 2),
    "less itself": lambda g: g - g.mean(1, keepdim=True),
    "over itself": lambda g: g / g.norm(),
    "times its inverse": lambda g: g * g.reciprocal(),
    "with its sign": lambda g: g.sign() + g,
    "by its sign": lambda g: g.sign() * g.sign(),
    "square over square": lambda g: g**2 / g.norm().square(),
}


@pytest.mark.parametrize("name", SCALES)
def test_a_scale_is_told_where_the_shards_losses_do_not_make_up_the_batchs(name: str) -> None:
    """Of a function whose value scales with its argument: it is told, or adds up."""
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    each = lambda g: SCALES[name](g).sum()  # of one sample

    def step(x: Tensor) -> Tensor:
        x = x.requires_grad_()
        g = gradient(x.square().mean(), x)
        return torch.stack([each(row[None]) for row in g]).mean()

    def at_once(x: Tensor) -> Tensor:
        return SCALES[name](gradient(x.square().mean(), x)).sum()

    adds_up = torch.allclose(whole(step, x.clone(), (3, 2)), step(x.clone()), rtol=1e-4)
    assert (told(at_once) is None) == adds_up


def test_a_function_that_is_not_known_tells_nothing() -> None:
    step = lambda x: gradient(x.square().mean(), x).sort(1).values.sum() + 1
    assert told(step) is None


def test_gradients_of_parameters_and_of_what_is_no_mean_are_not_told() -> None:
    weight = torch.ones(4, requires_grad=True)
    assert told(lambda x: gradient((x @ weight).mean(), weight).sum()) is None
    assert told(lambda x: gradient(x.square().sum(), x).square().mean() + 1) is None
    assert told(lambda x: gradient(x.square().mean().sqrt(), x).sum()) is None
