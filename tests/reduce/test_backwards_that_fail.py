"""A backward that fails leaves nothing on replicas: the next step is one device's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.oracle import devices_of
from torch import Tensor, nn

from lightning_dp.parallel.reduce import reducer
from lightning_dp.parallel.split import split_policy
from lightning_dp.parallel.step import StepParallel

pytestmark = pytest.mark.usefixtures("on")

EXECUTORS = pytest.mark.parametrize("executor", ["threads", "inorder"])


class Failing(torch.autograd.Function):
    """Its backward fails, once."""

    is_due = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if Failing.is_due:
            Failing.is_due = False
            raise ValueError("the user's own")
        return gradient


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.last(Failing.apply(self.first(x)))  # the last layer has its gradient then
        return z

    def training_step(self, x: Tensor) -> Tensor:
        return self(x).square().mean()


def batch() -> Tensor:
    return torch.randn(7, 4, generator=torch.Generator().manual_seed(0))


def right() -> list[Tensor]:
    net = Net()
    net.training_step(batch()).backward()
    return [parameter.grad for parameter in net.parameters() if parameter.grad is not None]


def engine_of(net: nn.Module, executor: str) -> StepParallel:
    devices = devices_of(3)
    split = split_policy("even", None, devices)
    return StepParallel(net, devices, output_device=devices[0], split=split, executor=executor)


def check_steps(net: nn.Module, backward: Callable[[], None]) -> None:
    for _ in range(2):
        net.zero_grad()
        backward()
        for parameter, gradient in zip(net.parameters(), right(), strict=True):
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad.cpu(), gradient)


@EXECUTORS
@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_after_a_backward_or_a_sum_that_failed(
    error: type[BaseException], executor: str, steps_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ValueError in the middle of the backward, or an interrupt while gradients are summed."""
    net = Net().to(devices_of(1)[0])
    engine, x = engine_of(net, executor), batch().to(devices_of(1)[0])

    def backward() -> None:
        engine.train("training_step", engine.scatter(x)).backward()

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    for _ in range(steps_before):
        net.zero_grad()
        backward()
    net.zero_grad()
    with monkeypatch.context() as patch, contextlib.suppress(error):
        if error is ValueError:
            Failing.is_due = True
        else:
            patch.setattr(reducer, "reduce_gradients", interrupted)
        backward()
    assert not Failing.is_due
    check_steps(net, backward)
    engine.close()
