"""Gradients go through buffers: those that are leaves, and those that are computed of weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.forward_twins import CPU, EXACT, engine_of, inputs
from support.oracle import assert_equal_trees, devices_of
from torch import Tensor, nn

from lightning_dp.parallel.step import StepParallel

pytestmark = pytest.mark.usefixtures("on")


class Moved(nn.Module):
    """A layer whose result is scaled by a buffer, which stays a leaf where the module is moved."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(10, 3).double()
        self.register_buffer("scale", torch.full((3,), 0.5, dtype=torch.float64))
        self.scale.requires_grad_()

    def to(self, *args: Any, **kwargs: Any) -> Any:
        moved = super().to(*args, **kwargs)
        self.scale = self.scale.detach().requires_grad_()
        return moved

    def prepare(self) -> None:
        """Called before every step."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) * self.scale.exp()

    def training_step(self, x: Tensor) -> Tensor:
        return (self(x) - 1).square().mean()


class Computed(Moved):
    """The buffer is a function of a parameter, which the layer uses as well."""

    def prepare(self) -> None:
        self.scale = self.layer.weight.exp().mean(1)


class Cached(Moved):
    """A step leaves what it computes, with its graph, and the next one reads the value."""

    def forward(self, x: Tensor) -> Tensor:
        self.scale = self.layer.weight.exp().mean(1) + 0.1 * self.scale.detach()
        return torch.tanh(self.layer(x)) * self.scale


def steps(net: Moved, loss_of: Callable[[Tensor], Tensor]) -> Any:
    """What the gradients were in a few steps of gradient descent."""
    seen = []
    for seed in range(3):
        net.prepare()
        loss_of(inputs(6, 10, seed)).backward()
        trained = [*net.parameters(), *([net.scale] if type(net) is Moved else [])]
        seen.append([None if t.grad is None else t.grad.cpu().clone() for t in trained])
        with torch.no_grad():
            for tensor in trained:
                if tensor.grad is not None:
                    tensor -= 0.1 * tensor.grad
                    tensor.grad = None
    return seen


def assert_same_steps(make: type[Moved], actual: Any, net: Moved) -> None:
    one = make()
    assert_equal_trees(actual, steps(one, one.training_step), "gradients", **EXACT)
    assert_equal_trees(dict(net.state_dict()), dict(one.state_dict()), "state", **EXACT)


def step_engine(net: nn.Module, sizes: tuple[int, ...], **options: Any) -> StepParallel:
    devices = devices_of(len(sizes))
    split: Any = lambda n: sizes
    return StepParallel(net.to(devices[0]), devices, output_device=CPU, split=split, **options)


@pytest.mark.parametrize("executor", ["threads", "inorder"])
def test_a_step_reads_the_value_of_what_the_last_one_has_computed(executor: Any) -> None:
    net = Cached()
    engine = step_engine(net, (3, 2, 1), executor=executor)
    net.scale = net.scale.detach()
    actual = steps(net, lambda x: engine.train("training_step", x))
    engine.close()
    assert_same_steps(Cached, actual, net)


def test_a_step_on_several_devices_refuses_leaves() -> None:
    engine = step_engine(Moved(), (3, 2, 1))
    with pytest.raises(ValueError, match=r"buffers without gradients, got \['scale'.*parameters"):
        engine.train("training_step", inputs(6, 10))
    engine.close()


@pytest.mark.parametrize("make", [Moved, Computed, Cached])
@pytest.mark.parametrize(("sizes", "executor"), [((3, 2, 1), "threads"), ((0, 4, 2), "inorder")])
def test_in_forward_mode(make: type[Moved], sizes: tuple[int, ...], executor: Any) -> None:
    net = make()
    with engine_of(net, sizes, executor=executor) as engine, engine.spreading():
        actual = steps(net, net.training_step)
    assert_same_steps(make, actual, net)


def test_hooks_of_leaves_see_the_sum_once() -> None:
    def use(net: Moved) -> Any:
        seen: list[Tensor] = []
        net.scale.register_hook(lambda g: seen.append(g.cpu()) or 2 * g)
        net.scale.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.cpu()))
        net.training_step(inputs(6, 10)).backward()
        return [*seen, net.scale.grad.cpu()]

    one, net = Moved(), Moved().to(devices_of(1)[0])
    with engine_of(net, (3, 2, 1)) as spread, spread.spreading():
        actual = use(net)
    assert_equal_trees(actual, use(one), "hooks", **EXACT)
