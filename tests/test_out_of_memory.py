"""A step that does not fit on a device runs again with fewer samples there, as if nothing was."""

import gc
from collections.abc import Iterator
from typing import Any

import oracle
import pytest
import torch
from oracle import Classifier, assert_same, run
from torch import Tensor, nn

WIDTH = 512
"""Wide enough for activations to be what memory goes to."""


class Wide(Classifier):
    """Its steps take memory in proportion to the samples; it leaves state in many places."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(10, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3)).double()
        self.seen: list[Tensor] = []
        self.calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(batch[1])
        loss = self.loss(batch)
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        return loss


class HeavyBackward(torch.autograd.Function):
    """Takes memory in the backward only: `factor` times its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: int) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        heavy = gradient.repeat(ctx.factor, 1)
        return gradient + 0 * heavy[: len(gradient)], None


class WideInBackward(Wide):
    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        h = HeavyBackward.apply(self.net[:2](x), 8)
        return nn.functional.cross_entropy(self.net[2](h), y)


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Sets a simulated device's limit: what it has in use now and so many bytes more."""
    from lightning_dp import sim

    sim.enable(8)
    monkeypatch.setattr(oracle, "ON", "sim")

    def set_limit(device: int, extra: int) -> None:
        gc.collect()
        torch.sim.set_memory_limit(device, torch.sim.memory_allocated(device) + extra)

    yield set_limit
    for device in range(8):
        torch.sim.set_memory_limit(device, None)


PARAMETERS = 8 * (10 * WIDTH + WIDTH + 3 * WIDTH + 3)
PER_SAMPLE = 8 * WIDTH
SMALL = 3 * PARAMETERS + 6 * PER_SAMPLE
"""Room for weights, gradients (and their copy on the way to the root) and some samples of 13."""


@pytest.mark.parametrize("make", [Wide, WideInBackward])
@pytest.mark.parametrize("split", ["even", "chunk", "memory", "adaptive"])
def test_a_device_that_is_too_small_for_its_share(make: Any, split: str, limit: Any) -> None:
    limit(1, SMALL)
    result = run(make, 2, strategy={"split": split}, precision="64-true")
    assert 0 < result.trainer.strategy.usage[1].samples < result.trainer.strategy.usage[0].samples
    limit(1, 2**30)
    expected = run(make, 1, precision="64-true")
    assert_same(result, expected)
    assert [t.tolist() for t in result.module.seen] == [t.tolist() for t in expected.module.seen]
