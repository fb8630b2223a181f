"""The caller is on streams of its own: all that the engine does for it has to be in order there.

Workers and autograd's threads have other current streams. Simulated devices raise an error where
nothing orders the work of two. `--side-streams` brings all other tests into the same position.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.device_kinds import on_accelerators
from support.forward_twins import CHECKPOINTED, EXACT, engine_of, layers, perceptron
from support.oracle import ByHand, Classifier, assert_equal_trees, assert_same, devices_of, run
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_dp.parallel.apply import collectives
from lightning_dp.parallel.step import StepParallel

pytestmark = [on_accelerators, pytest.mark.usefixtures("on", "on_side_streams")]
EXECUTORS = ["threads", "inorder"]


@pytest.fixture(params=EXECUTORS)
def executor(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Manual(ByHand, Classifier):
    pass


class Normed(Classifier):
    def __init__(self) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(16)
        self.net = nn.Sequential(nn.Linear(10, 16), norm, nn.Tanh(), nn.Linear(16, 3))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), self.lr)  # the first bias has no gradient


CASES: dict[str, tuple[type[Classifier], dict[str, Any], dict[str, Any]]] = {
    "forward": (Classifier, {"mode": "forward"}, {}),
    "manual": (Manual, {}, {}),
    "values on the host": (Classifier, {"output_device": "cpu"}, {}),
    "accumulating": (Classifier, {}, {"accumulate_grad_batches": 2}),
    "synced batch norm": (Normed, {}, {"sync_batchnorm": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_fit(case: str, executor: str) -> None:
    make, options, fit = CASES[case]
    expected = run(make, 1, max_epochs=1, accelerator="cpu", **fit)
    result = run(make, 3, max_epochs=1, strategy={"executor": executor, **options}, **fit)
    assert_same(result, expected, atol=1e-4)


def summed(net: nn.Module) -> list[Tensor]:
    return [p.grad.cpu() for p in net.parameters() if p.grad is not None]


class Step(nn.Module):
    def __init__(self, step: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.step = perceptron().double(), step

    def training_step(self, x: Tensor) -> Tensor:
        return self.step(self.net, x)


def of_all(net: nn.Module, x: Tensor) -> Tensor:
    return collectives.all_gather(net(x)).std(0).sum()


def test_a_step_whose_replicas_meet(executor: str) -> None:
    x = torch.randn(6, 4, dtype=torch.float64)
    one = Step(of_all)
    one.training_step(x).backward()
    net, devices = Step(of_all).to(devices_of(1)[0]), devices_of(3)
    engine = StepParallel(
        net, devices, output_device=devices[0], split=lambda n: (3, 2, 1), executor=executor
    )
    engine.train("training_step", x).backward()
    engine.close()
    assert_equal_trees(summed(net), summed(one), "gradients", **EXACT)


@pytest.mark.parametrize("way", CHECKPOINTED)
def test_a_checkpoint_around_spread_calls(way: str, executor: str) -> None:
    """Its calls are made again in a thread of autograd."""
    torch.manual_seed(0)
    one = layers().double()
    torch.manual_seed(0)
    net = layers().double()
    with engine_of(net, executor=executor) as engine:
        with engine.spreading():
            got = CHECKPOINTED[way](net)
        assert_equal_trees(got, CHECKPOINTED[way](one), "gradients", **EXACT)


def test_a_call_that_is_made_again_in_a_backward_copies_no_weights() -> None:
    """Other threads of the backward are at work with them."""
    net = layers().double()
    x = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    with engine_of(net) as engine, engine.spreading():
        loss = checkpoint(net, x, use_reentrant=False).square().sum()
        weights = [p for own in engine.replicas.parameters[1:] for p in own]
        with torch.no_grad():
            for weight in weights:
                weight.data.zero_()
        loss.backward()
        assert not any(weight.any() for weight in weights)
