"""Every output has a graph of its own, also where outputs travel together between devices."""

from typing import Any

import pytest
import torch
from support.forward_twins import compare, inputs
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("on")


class Heads(nn.Module):
    """Three heads with no layer in common, each returned by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, n)) for n in (2, 3, 1)
        )

    def forward(self, x: Tensor) -> Any:
        a, b, c = (head(x).exp() + 0.5 for head in self.heads)
        return {"a": a, "rest": [b, (c,)]}


def outputs_of(net: Any, x: Tensor) -> list[Tensor]:
    out = net(x)
    return [out["a"], out["rest"][0], out["rest"][1][0]]


def one_is_not_used(net: Any) -> None:
    outputs = outputs_of(net, inputs())
    (outputs[0].mean() + outputs[2].square().mean()).backward()


def gradients_of_each(net: Any) -> Any:
    pairs = zip(net.heads, outputs_of(net, inputs()), strict=True)
    return [torch.autograd.grad(y.exp().mean(), list(head.parameters())) for head, y in pairs]


def a_penalty_of_one(net: Any) -> Any:
    x = inputs().requires_grad_()
    first, second, _ = outputs_of(net, x)
    (slope,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    slope.square().mean().backward()
    second.mean().backward()
    return x.grad


def in_place(net: Any) -> None:
    first, second, _ = outputs_of(net, inputs())
    first.mul_(2).mean().backward()
    second.relu_().square().mean().backward()


USES = [one_is_not_used, gradients_of_each, a_penalty_of_one, in_place]


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
@pytest.mark.parametrize("sizes", [(2, 3, 1), (0, 4, 2)], ids=str)
def test_outputs_have_graphs_of_their_own(use: Any, sizes: tuple[int, ...]) -> None:
    compare(Heads, use, sizes)
