"""examples/gan.py: manual optimisation with two optimizers has the loss curves of one device."""

import pytest
import torch
from support import oracle
from support.device_kinds import not_repeated

from lightning_dp.examples.gan import Recorder, frechet_distance, learn

EPOCHS = 2


def losses(accelerator: str, devices: int) -> Recorder:
    run = Recorder()
    learn(run, accelerator=accelerator, devices=devices, epochs=EPOCHS)
    return run


@pytest.fixture(scope="module")
def one_device() -> Recorder:
    return losses("cpu", 1)


@not_repeated
def test_the_loss_curves_are_those_of_one_device(on: str, one_device: Recorder) -> None:
    oracle.devices_of(4)
    several = losses(oracle.accelerator(), 4)
    assert len(several.losses) == EPOCHS * 15
    for a, b in zip(several.losses, one_device.losses, strict=True):
        assert a == pytest.approx(b, abs=1e-4, rel=0)
    assert several.distance == pytest.approx(one_device.distance, abs=1e-3)


def test_the_distance_of_two_normal_distributions() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50_000, 3, generator=generator, dtype=torch.float64)
    scale = torch.tensor([1.0, 2.0, 0.5]).double()
    expected = (scale - 1).square().sum() + 4 * 3
    torch.testing.assert_close(
        frechet_distance(x, x * scale + 2).double(), expected, rtol=2e-2, atol=0
    )
    assert float(frechet_distance(x, x)) == pytest.approx(0, abs=1e-6)
