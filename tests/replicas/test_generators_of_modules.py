"""A module's generator: each device draws from one of its own, which follows the root's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


def all_draw_other_numbers_and_the_root_those_of_one_device(net: Noise, call: Any) -> bool:
    drawn = torch.cat([call(), call()])
    net.generator.manual_seed(5)
    alone = net(torch.zeros(2, 4, device=drawn.device))
    return len(drawn.unique()) == drawn.numel() == 96 and torch.equal(drawn[:2], alone)


def who_sets_the_roots_seed_or_state_sets_all(net: Noise, call: Any) -> bool:
    first, state = call(), net.generator.get_state()
    second = call()
    net.generator.set_state(state)
    is_second = torch.equal(call(), second) and not torch.equal(first, second)
    net.generator.manual_seed(5)
    is_first = torch.equal(call(), first)
    net.generator = net.again["generator"] = torch.Generator(first.device).manual_seed(5)
    return is_second and is_first and torch.equal(call(), first)


def where_the_root_has_no_samples_the_others_go_on(net: Noise, call: Any) -> bool:
    return not torch.equal(call(weights=[0, 1, 1]), call(weights=[0, 1, 1]))


LAWS: list[Callable[[Noise, Any], bool]] = [
    all_draw_other_numbers_and_the_root_those_of_one_device,
    who_sets_the_roots_seed_or_state_sets_all,
    where_the_root_has_no_samples_the_others_go_on,
]


@pytest.mark.parametrize("law", LAWS)
def test_generators(law: Callable[[Noise, Any], bool]) -> None:
    net = Noise()
    x = torch.zeros(6, 4, device=devices_of(1)[0])
    with wrapping() as wrap:
        wrappers: dict[str, Any] = {}

        def call(**options: Any) -> Tensor:
            if str(options) not in wrappers:
                wrappers[str(options)] = wrap(net, 3, **options)
            return wrappers[str(options)](x)

        assert law(net, call)
