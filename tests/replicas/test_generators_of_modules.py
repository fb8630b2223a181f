"""A module's generator: each device draws from one of its own, which follows the root's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.device_kinds import on_separate
from support.forward_twins import wrapping
from support.oracle import devices_of
from torch import Tensor, nn

from lightning_dp import DataParallel

pytestmark = [on_separate, pytest.mark.usefixtures("on")]


class Noise(nn.Module):
    """Adds what it draws."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, device=generator.device))
        self.generator = generator
        self.child = Again(generator)

    def forward(self, x: Tensor) -> Tensor:
        first = torch.randn(x.shape, generator=self.generator, device=x.device)
        return self.scale * torch.stack([first, self.child(x)], 1)


class Again(nn.Module):
    """Draws from the same one."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator = generator

    def forward(self, x: Tensor) -> Tensor:
        return torch.randn(x.shape, generator=self.generator, device=x.device)


def noise(k: int = 3) -> tuple[Any, torch.Generator]:
    root = devices_of(k)[0]
    generator = torch.Generator(root).manual_seed(5)
    return Noise(generator), generator


def test_all_draw_other_numbers_and_the_root_those_of_one_device() -> None:
    net, generator = noise()
    with wrapping() as wrap:
        drawn = torch.cat([wrap(net, 3)(torch.zeros(6, 4, device=devices_of(3)[0])) for _ in "ab"])
        assert len(drawn.unique()) == drawn.numel() == 96
        generator.manual_seed(5)
        assert torch.equal(drawn[:2], net(torch.zeros(2, 4, device=drawn.device)))


def test_who_sets_the_roots_seed_or_state_sets_all() -> None:
    net, generator = noise()
    x = torch.zeros(6, 4, device=devices_of(3)[0])
    with wrapping() as wrap:
        wrapper = wrap(net, 3)
        first, state = wrapper(x), generator.get_state()
        second = wrapper(x)
        generator.set_state(state)
        assert torch.equal(wrapper(x), second) and not torch.equal(first, second)
        generator.manual_seed(5)
        assert torch.equal(wrapper(x), first)
        net.generator = net.child.generator = torch.Generator(x.device).manual_seed(5)
        assert torch.equal(wrapper(x), first)


def test_replicas_of_one_device_draw_other_numbers_too() -> None:
    net, _ = noise()
    first, second = devices_of(2)
    x = torch.zeros(8, 4, device=first)
    wrapper = DataParallel(net, [first, first, second, second])
    drawn = torch.cat([wrapper(x), wrapper(x)])
    assert len(drawn.unique()) == drawn.numel()
    wrapper.close()


def test_where_the_root_has_no_samples_the_others_go_on() -> None:
    net, _ = noise()
    x = torch.zeros(6, 4, device=devices_of(3)[0])
    with wrapping() as wrap:
        wrapper = wrap(net, 3, weights=[0, 1, 1])
        assert not torch.equal(wrapper(x), wrapper(x))
