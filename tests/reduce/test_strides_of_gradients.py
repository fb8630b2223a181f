"""Gradients that reach the root have their parameters' strides, on which fused optimizers rely."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.forward_twins import EXACT
from support.oracle import assert_equal_trees, devices_of, gradients
from torch import Tensor, nn

from lightning_dp.parallel.step import StepParallel

pytestmark = pytest.mark.usefixtures("on")


class Strided(nn.Module):
    """Parameters whose memory is not in the order of their dimensions."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.linear = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 6)
        self.unused = nn.Linear(2, 2)
        self.double()
        if kind == "channels_last":
            self.to(memory_format=torch.channels_last)
        elif kind == "transposed":
            self.linear.weight = nn.Parameter(torch.randn(4, 6, dtype=torch.float64).t())
        elif kind == "permuted":
            weight = torch.randn(3, 3, 4, 3, dtype=torch.float64).permute(2, 3, 1, 0)
            self.conv.weight = nn.Parameter(weight)
        elif kind == "of one channel":
            self.conv = nn.Conv2d(3, 4, 1).double().to(memory_format=torch.channels_last)

    def training_step(self, x: Tensor) -> Tensor:
        # What comes of permuted views are gradients of other strides than the weights'.
        h = self.conv(x).mean((2, 3)) @ self.linear.weight.t().contiguous()
        return (torch.tanh(h) - 0.5).square().mean()


def images(seed: int) -> Tensor:
    x = torch.randn(6, 3, 5, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.to(memory_format=torch.channels_last) if seed % 2 else x


def train(net: nn.Module, loss_of: Callable[[Tensor], Tensor], backwards: int) -> list[Tensor]:
    """The losses of a few steps of a fused optimizer (simulated devices have no such kernels)."""
    updates = torch.optim.AdamW(net.parameters(), 0.1, fused=devices_of(1)[0].type != "sim")
    seen = []
    for step in range(3):
        updates.zero_grad()
        for i in range(backwards):
            loss = loss_of(images(step + i))
            loss.backward()
            seen.append(loss.detach().cpu())
        for p in net.parameters():
            if p.grad is not None:
                dims = [d for d, length in enumerate(p.shape) if length > 1]
                assert [p.grad.stride(d) for d in dims] == [p.stride(d) for d in dims]
        updates.step()
    return seen


@pytest.mark.parametrize(
    "kind", ["plain", "channels_last", "transposed", "permuted", "of one channel"]
)
@pytest.mark.parametrize(("sizes", "backwards"), [((3, 2, 1), 1), ((0, 4, 2), 2)])
def test_gradients_and_updates_are_those_of_one_device(
    kind: str, sizes: tuple[int, ...], backwards: int
) -> None:
    """Two backwards accumulate; a hook has the gradient summed apart."""
    net, one, devices = Strided(kind), Strided(kind), devices_of(len(sizes))
    split: Any = lambda n: sizes
    output_device = torch.device("cpu")
    engine = StepParallel(net.to(devices[0]), devices, output_device=output_device, split=split)
    if backwards > 1:
        net.conv.weight.register_hook(lambda g: None)
    actual = train(net, lambda x: engine.train("training_step", x), backwards)
    engine.close()
    assert_equal_trees(actual, train(one, one.training_step, backwards), "losses", **EXACT)
    assert_equal_trees(gradients(net), gradients(one), "gradients", **EXACT)
    assert_equal_trees(dict(net.state_dict()), dict(one.state_dict()), "state", **EXACT)
