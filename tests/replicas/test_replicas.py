"""Replicas: one module on every device, following the root and never touching it."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support.oracle import devices_of
from torch import Tensor, nn

from lightning_dp.parallel.replicate import Replicas

pytestmark = pytest.mark.usefixtures("on")


def on_root(*shape: int) -> Tensor:
    return torch.randn(shape, device=devices_of(1)[0])


def replicas_of(module: nn.Module, places: Sequence[int] = (0, 1, 2)) -> Replicas:
    devices = devices_of(max(places) + 1)
    return Replicas(module.to(devices[0]), [devices[i] for i in places])


def device_of(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


def call(module: nn.Module, x: Tensor) -> Any:
    return module(x.to(device_of(module)))


def test_buffers_that_a_step_writes_or_binds_are_the_replicas_own_until_all_are_copied() -> None:
    class Averaging(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(2)
            self.register_buffer("mean", torch.zeros(2))
            self.register_buffer("late", None)

        def forward(self, x: Tensor) -> Tensor:
            self.mean = 0.5 * self.mean + x.mean(0)
            self.late = x[0]
            return self.norm(x)

    net = Averaging()
    replicas = replicas_of(net, (0, 1, 0))
    for other in replicas.modules[1:]:
        call(other, torch.ones(3, 2))
        assert other.mean.tolist() == [1, 1] and other.norm.num_batches_tracked == 1
    assert net.mean.tolist() == [0, 0] and net.late is None and net.norm.num_batches_tracked == 0
    replicas.refresh(buffers="all")
    for own in replicas.modules:
        assert own.mean.tolist() == [0, 0] and own.late is None
        assert own.norm.running_mean.tolist() == [0, 0] and own.norm.num_batches_tracked == 0


def test_modules_and_replicas_made_in_inference_mode_can_be_trained() -> None:
    with torch.inference_mode():
        net = nn.BatchNorm1d(2).to(devices_of(1)[0])
        replicas = replicas_of(net, (0, 1, 0))
        replicas.mark_stale()
        replicas.refresh()
    for other in replicas.modules[1:]:
        call(other, on_root(4, 2)).sum().backward()
        assert other.weight.grad is not None


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a lazy layer": (lambda: nn.LazyLinear(3), r"LazyLinear.weight, whose shape is not known yet"),
    "a traced submodule": (
        lambda: torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)),
        "torch.jit compiled and which cannot be replicated",
    ),
    "rows of limited norm": (lambda: nn.Embedding(3, 2, max_norm=1.0), "max_norm: expected None"),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.*:DeprecationWarning")
@pytest.mark.parametrize("kind", REFUSED)
def test_modules_that_cannot_be_replicated_are_named(kind: str) -> None:
    make, message = REFUSED[kind]
    with pytest.raises(ValueError, match=message):
        replicas_of(nn.Sequential(make()))
