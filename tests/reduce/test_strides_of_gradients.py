"""Gradients that reach the root have their parameters' strides, as autograd gives them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.forward_twins import EXACT
from support.oracle import assert_equal_trees, devices_of, gradients
from torch import Tensor, nn

from lightning_dp.parallel.step import StepParallel

pytestmark = pytest.mark.usefixtures("on")

CPU = torch.device("cpu")


class Strided(nn.Module):
    """Parameters whose memory is not in the order of their dimensions."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.linear = nn.Linear(4, 6)
        self.scale = nn.Parameter(torch.ones(6))
        self.unused = nn.Linear(2, 2)
        self.double()
        if kind == "channels_last":
            self.to(memory_format=torch.channels_last)
        elif kind == "transposed":
            self.linear.weight = nn.Parameter(torch.randn(4, 6, dtype=torch.float64).t())
        elif kind == "sliced":
            self.linear.weight = nn.Parameter(torch.randn(6, 8, dtype=torch.float64)[:, ::2])
        elif kind == "permuted":
            weight = torch.randn(3, 3, 4, 3, dtype=torch.float64).permute(2, 3, 1, 0)
            self.conv.weight = nn.Parameter(weight)
        elif kind == "of one channel":
            self.conv = nn.Conv2d(3, 4, 1).double().to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        # What comes of permuted views are gradients of other strides than the weights'.
        w = self.linear.weight
        h = self.conv(x).mean((2, 3))
        return torch.tanh(h @ w.t().contiguous()) * self.scale

    def training_step(self, x: Tensor) -> Tensor:
        return (self(x) - 0.5).square().mean()


KINDS = ["plain", "channels_last", "transposed", "sliced", "permuted", "of one channel"]
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "foreach": partial(torch.optim.AdamW, lr=0.1, foreach=True),
    "fused": partial(torch.optim.AdamW, lr=0.1, fused=True),
}


def images(seed: int, channels_last: bool = True) -> Tensor:
    x = torch.randn(6, 3, 5, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.to(memory_format=torch.channels_last) if channels_last else x


def train(
    net: nn.Module, loss_of: Callable[[Tensor], Tensor], optimizer: str, backwards: int = 1
) -> Any:
    """The losses of a few steps, and the strides of the gradients in each."""
    if devices_of(1)[0].type == "sim":  # which has no such kernels
        optimizer = optimizer.replace("fused", "foreach")
    updates = OPTIMIZERS[optimizer](net.parameters())
    seen = []
    for seed in range(3):
        updates.zero_grad()
        for i in range(backwards):
            loss = loss_of(images(seed, channels_last=(seed + i) % 2 == 0))
            loss.backward()
            seen.append(loss.detach().cpu())
        assert_strides_as_autograd_gives(net)
        updates.step()
    return seen


def assert_strides_as_autograd_gives(net: nn.Module) -> None:
    """Those of the parameter where its memory is dense; dims of one entry have no stride."""
    for p in net.parameters():
        if p.grad is not None and torch.empty_like(p).stride() == p.stride():
            dims = [d for d, length in enumerate(p.shape) if length > 1]
            assert [p.grad.stride(d) for d in dims] == [p.stride(d) for d in dims]


def assert_as_one_device(
    kind: str, actual: Any, net: nn.Module, optimizer: str, backwards: int = 1
) -> None:
    one = Strided(kind)
    if kind == "sliced" and devices_of(1)[0].type == "cuda":
        # A copy on a GPU is dense; on the CPU fused kernels update what lies beside a slice.
        optimizer = optimizer.replace("fused", "foreach")
    expected = train(one, one.training_step, optimizer, backwards)
    assert_equal_trees(actual, expected, "losses", **EXACT)
    assert_equal_trees(gradients(net), gradients(one), "gradients", **EXACT)
    assert_equal_trees(dict(net.state_dict()), dict(one.state_dict()), "state", **EXACT)


def step_engine(net: nn.Module, sizes: tuple[int, ...], **options: Any) -> StepParallel:
    devices = devices_of(len(sizes))
    split: Any = lambda n: sizes
    return StepParallel(net.to(devices[0]), devices, output_device=CPU, split=split, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("optimizer", "sizes", "backwards"), [("foreach", (3, 2, 1), 1), ("fused", (0, 4, 2), 2)]
)
def test_gradients_and_updates_are_those_of_one_device(
    kind: str, optimizer: str, sizes: tuple[int, ...], backwards: int
) -> None:
    """Two backwards accumulate; a hook has the gradient summed apart."""
    net = Strided(kind)
    engine = step_engine(net, sizes)
    if backwards > 1:
        net.conv.weight.register_hook(lambda g: None)
    actual = train(net, lambda x: engine.train("training_step", x), optimizer, backwards)
    engine.close()
    assert_as_one_device(kind, actual, net, optimizer, backwards)
