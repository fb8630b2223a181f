"""Derivatives in forward mode: refused in threads, and one device's where replicas take turns."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
import torch
from support.device_kinds import not_on_sim
from support.oracle import devices_of
from torch import Tensor, nn

from lightning_dp.parallel.step import StepParallel

pytestmark = [
    pytest.mark.usefixtures("on"),
    not_on_sim,  # which has no tensors of forward-mode derivatives
    # The first derivative of this kind makes torch compile functions for it.
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning"),
]


class Net(nn.Linear):
    """Its loss has a derivative in it."""

    def __init__(self) -> None:
        super().__init__(3, 1, dtype=torch.float64)

    def training_step(self, x: Tensor) -> Tensor:
        out, slope = torch.func.jvp(lambda x: self(x).tanh(), (x,), (torch.ones_like(x),))
        return (out.square() + slope.square()).mean()


def step(executor: Any) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    devices = devices_of(3)
    net, x = Net().to(devices[0]), torch.randn(9, 3, dtype=torch.float64).to(devices[0])
    split = {"output_device": devices[0], "split": lambda n: (n - 2 * (n // 3), n // 3, n // 3)}
    engine = StepParallel(net, devices, executor=executor, **split)
    with closing(engine):
        loss = engine.train("training_step", x)
        loss.backward()
    alone = Net()
    alone.load_state_dict(net.state_dict())
    alone.training_step(x.cpu()).backward()
    assert net.weight.grad is not None and alone.weight.grad is not None
    return net.weight.grad.cpu(), alone.weight.grad


def test_in_threads_they_are_refused_by_name() -> None:
    with pytest.raises(RuntimeError, match=r"torch.func.jvp.*executor=\"inorder\""):
        step("threads")


def test_in_order_they_are_one_devices() -> None:
    torch.testing.assert_close(*step("inorder"))
