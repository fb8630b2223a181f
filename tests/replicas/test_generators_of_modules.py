"""A module's generator: each device draws from one of its own, which follows the root's."""

from __future__ import annotations

import pytest
import torch
from support.device_kinds import on_separate
from support.forward_twins import wrapping
from support.oracle import devices_of
from torch import Tensor, nn

pytestmark = [on_separate, pytest.mark.usefixtures("on")]


class Noise(nn.Module):
    """Adds what it draws, twice with one generator."""

    def __init__(self) -> None:
        super().__init__()
        root = devices_of(1)[0]
        self.scale = nn.Parameter(torch.ones(1, device=root))
        self.generator = torch.Generator(root).manual_seed(5)
        self.again = {"generator": self.generator}

    def forward(self, x: Tensor) -> Tensor:
        drawn = [
            torch.randn(x.shape, generator=generator, device=x.device)
            for generator in (self.generator, self.again["generator"])
        ]
        return self.scale * torch.stack(drawn, 1)


def test_all_draw_other_numbers_and_follow_the_roots() -> None:
    net = Noise()
    x = torch.zeros(6, 4, device=devices_of(1)[0])
    with wrapping() as wrap:
        call = wrap(net, 3)
        first, state = call(x), net.generator.get_state()
        second = call(x)
        assert len(torch.cat([first, second]).unique()) == 96
        net.generator.set_state(state)
        assert torch.equal(call(x), second)
        net.generator.manual_seed(5)
        assert torch.equal(call(x), first)
        net.generator.manual_seed(5)
        assert torch.equal(net(x[:2]), first[:2]), "the root draws what one device does"
        net.generator = net.again["generator"] = torch.Generator(x.device).manual_seed(5)
        assert torch.equal(call(x), first)


def test_where_the_root_has_no_samples_the_others_go_on() -> None:
    with wrapping() as wrap:
        call = wrap(Noise(), 3, weights=[0, 1, 1])
        x = torch.zeros(6, 4, device=devices_of(1)[0])
        assert not torch.equal(call(x), call(x))
