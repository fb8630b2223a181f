"""Gradients go through buffers: those that are leaves, and those that are computed of weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.forward_twins import EXACT, engine_of, inputs
from support.oracle import assert_equal_trees, devices_of
from torch import Tensor, nn

from lightning_dp.parallel.step import StepParallel

pytestmark = pytest.mark.usefixtures("on")

CPU = torch.device("cpu")


class Scaled(nn.Module):
    """A layer whose result is scaled by a buffer; `leaf` is what the buffer is computed of."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(10, 3).double()
        self.leaf = [torch.full((3,), 0.5, dtype=torch.float64, requires_grad=True)]
        self.register_buffer("scale", self.leaf[0])

    def prepare(self) -> None:
        """Called before every step."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) * self.scale.exp()

    def training_step(self, x: Tensor, batch_idx: int = 0) -> Tensor:
        return (self(x) - 1).square().mean()


class Moved(Scaled):
    """As `Scaled`, but the buffer stays a leaf where the module is moved."""

    def to(self, *args: Any, **kwargs: Any) -> Any:
        moved = super().to(*args, **kwargs)
        self.leaf[0] = self.scale = self.scale.detach().requires_grad_()
        return moved


class Computed(Scaled):
    """The buffer is a function of a parameter, which the layer uses as well."""

    def prepare(self) -> None:
        self.scale = self.layer.weight.exp().mean(1)


class Cached(Scaled):
    """A step leaves what it computes, with its graph, and the next one reads the value."""

    def forward(self, x: Tensor) -> Tensor:
        before = self.scale.detach()
        self.scale = self.layer.weight.exp().mean(1) + 0.1 * before
        return torch.tanh(self.layer(x)) * self.scale


def batch(seed: int = 0) -> Tensor:
    return inputs(6, 10, seed)


def update(net: Scaled) -> Any:
    """A step of gradient descent of parameters and leaves; what the gradients were."""
    trained = {"leaf": net.leaf[0], **dict(net.named_parameters())}
    if net.scale.is_leaf and not isinstance(net, Cached):
        trained["scale"] = net.scale
    seen = {name: None if t.grad is None else t.grad.cpu().clone() for name, t in trained.items()}
    with torch.no_grad():
        for tensor in {id(t): t for t in trained.values()}.values():
            if tensor.grad is not None:
                tensor -= 0.1 * tensor.grad
                tensor.grad = None
    return seen


def steps(net: Scaled, loss_of: Callable[[Tensor], Tensor], n: int = 3, times: int = 1) -> Any:
    """What the gradients were in a few steps, each of so many backwards."""
    seen = []
    for seed in range(n):
        for time in range(times):
            net.prepare()
            loss_of(batch(seed * times + time)).backward()
        seen.append(update(net))
    return seen


def assert_same_steps(make: type[Scaled], actual: Any, net: Scaled, times: int = 1) -> None:
    """As on one device of the same kind: a buffer that was moved is no leaf any more."""
    one = make().to(devices_of(1)[0])
    place = one.layer.weight.device
    expected = steps(one, lambda x: one.training_step(x.to(place)), len(actual), times)
    assert_equal_trees(actual, expected, "gradients", **EXACT)
    assert_equal_trees(dict(net.state_dict()), dict(one.state_dict()), "state", **EXACT)


def step_engine(net: nn.Module, sizes: tuple[int, ...], **options: Any) -> StepParallel:
    devices = devices_of(len(sizes))
    split: Any = lambda n: sizes
    return StepParallel(net.to(devices[0]), devices, output_device=CPU, split=split, **options)


@pytest.mark.parametrize("executor", ["threads", "inorder"])
def test_a_step_reads_the_value_of_what_the_last_one_has_computed(executor: Any) -> None:
    net = Cached()
    net.scale = net.scale.detach()
    engine = step_engine(net, (3, 2, 1), executor=executor)
    actual = steps(net, lambda x: engine.train("training_step", x))
    engine.close()
    assert_same_steps(Cached, actual, net)


def test_a_step_on_several_devices_refuses_leaves() -> None:
    engine = step_engine(Moved(), (3, 2, 1))
    with pytest.raises(ValueError, match=r"buffers without gradients, got \['scale'.*parameters"):
        engine.train("training_step", batch())
    engine.close()


@pytest.mark.parametrize("make", [Scaled, Moved, Computed, Cached])
@pytest.mark.parametrize(("sizes", "executor"), [((3, 2, 1), "threads"), ((0, 4, 2), "inorder")])
def test_in_forward_mode(make: type[Scaled], sizes: tuple[int, ...], executor: Any) -> None:
    net = make()
    with engine_of(net, sizes, executor=executor) as engine, engine.spreading():
        actual = steps(net, net.training_step)
    assert_same_steps(make, actual, net)


def test_hooks_of_leaves_see_the_sum_once() -> None:
    def use(net: Scaled) -> Any:
        seen: list[Tensor] = []
        net.scale.register_hook(lambda g: seen.append(g.cpu()) or 2 * g)
        net.scale.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.cpu()))
        net.training_step(batch()).backward()
        return [*seen, net.scale.grad]

    one, net = Moved(), Moved().to(devices_of(1)[0])
    with engine_of(net, (3, 2, 1)) as spread, spread.spreading():
        actual = use(net)
    assert_equal_trees([t.cpu() for t in actual], use(one), "hooks", **EXACT)
