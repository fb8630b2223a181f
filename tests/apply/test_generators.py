"""Each device draws its own random numbers, and an activation checkpoint its own again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.oracle import devices_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_dp import DataParallel

pytestmark = pytest.mark.usefixtures("on", "one_thread")
on_separate = pytest.mark.on("sim", "multigpu")


class Dropped(nn.Module):
    """Linear in its weights: with their gradients multiplied, these add up to the outputs."""

    def __init__(self, is_reentrant: bool = False, p: float = 0.5, preserve: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(1, 2, 1024, dtype=torch.float64))
        self.p = p
        self.options = {"use_reentrant": is_reentrant, "preserve_rng_state": preserve}

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = checkpoint(self.part, x.requires_grad_(), **self.options)
        return x

    def part(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.weight.expand_as(x), self.p)


def has_the_forwards_numbers(wrapper: Any, net: Dropped) -> bool:
    net.weight.grad = None
    total = wrapper(torch.zeros(8, 1024, dtype=torch.float64)).sum()
    total.backward()
    assert net.weight.grad is not None
    return torch.allclose((net.weight * net.weight.grad).sum(), total)


def check(net: Dropped, devices: Any, executor: Any, *, is_refused: bool = False) -> None:
    net = net.to(devices[0])
    wrapper = DataParallel(net, devices, executor=executor, check_first_call=False)
    if is_refused:
        with pytest.raises(RuntimeError, match=r'no activation checkpoint.*executor="inorder"'):
            wrapper(torch.zeros(8, 1024, dtype=torch.float64))
    assert all([has_the_forwards_numbers(wrapper, net) for _ in range(5)])
    wrapper.close()


@pytest.mark.parametrize(
    ("options", "executor", "is_refused"),
    [
        ({}, "auto", False),
        ({"is_reentrant": True}, "inorder", False),
        ({}, "threads", True),
        ({"p": 0.0}, "threads", False),
        ({"p": 0.0, "preserve": False}, "threads", False),
    ],
)
def test_replicas_that_share_a_generator_take_turns(
    options: Any, executor: Any, is_refused: bool
) -> None:
    """In threads they are refused, and take turns from then on."""
    check(Dropped(**options), devices_of(1) * 3, executor, is_refused=is_refused)


@on_separate
def test_devices_with_generators_of_their_own_may_run_at_once() -> None:
    check(Dropped(), devices_of(3), "threads")


class Drawing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.rand_like(x) + 0 * F.dropout(x)


def drawn(seed: int) -> list[Tensor]:
    """What each of three devices draws in two calls."""
    options: Any = {"executor": "threads", "output_device": "cpu", "check_first_call": False}
    wrapper = DataParallel(Drawing(), devices_of(3), **options)
    torch.manual_seed(seed)
    found = [shard for _ in range(2) for shard in wrapper(torch.zeros(6, 4)).chunk(3)]
    wrapper.close()
    return found


@on_separate
def test_devices_of_one_seed_draw_different_numbers_and_the_root_draws_as_if_alone() -> None:
    first, again, other = drawn(0), drawn(0), drawn(1)
    assert all(map(torch.equal, first, again))
    assert len({tuple(shard.flatten().tolist()) for shard in first + other}) == 12
    torch.manual_seed(0)
    alone = Drawing()(torch.zeros(2, 4, device=devices_of(1)[0]))
    assert torch.equal(first[0], alone.cpu())


class Noise(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator(devices_of(1)[0])

    def forward(self, x: Tensor) -> Tensor:
        return torch.randn(x.shape, generator=self.generator, device=x.device)


@pytest.mark.on("cpu", "multigpu")  # CUDA takes a generator of another index, `sim` does not
def test_replicas_draw_from_the_modules_generator_one_after_another() -> None:
    net, x = Noise(), torch.zeros(6, 4)
    wrapper = DataParallel(net, devices_of(3), executor="threads", check_first_call=False)
    found = []
    for _ in range(2):
        net.generator.manual_seed(5)
        found.append(torch.cat([wrapper(x), wrapper(x)]).cpu())
    wrapper.close()
    net.generator.manual_seed(5)
    assert torch.equal(found[0], found[1]) and len(found[0].unique()) == 48
    assert torch.equal(found[0][:2], net(x[:2].to(devices_of(1)[0])).cpu())
