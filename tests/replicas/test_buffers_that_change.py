"""Buffers that get another shape, dtype, layout or memory and stay the same object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.forward_twins import EXACT, engine_of, inputs
from support.oracle import assert_equal_trees, devices_of, gradients
from torch import Tensor, nn

from lightning_dp.parallel.step import StepParallel

pytestmark = pytest.mark.usefixtures("on")

CPU = torch.device("cpu")


def filled(buffer: Tensor, shape: tuple[int, ...], step: int, **options: Any) -> Tensor:
    values = torch.arange(1.0, 1 + torch.Size(shape).numel(), dtype=torch.float64) / (step + 4)
    return values.view(shape).to(buffer.device, **options)


def grow(buffer: Tensor, step: int) -> None:
    buffer.resize_(4, 2 + step).copy_(filled(buffer, (4, 2 + step), step))


def other_dtype(buffer: Tensor, step: int) -> None:
    buffer.data = filled(buffer, (4, 3), step, dtype=torch.float32 if step % 2 else torch.float64)


def written_without_a_trace(buffer: Tensor, step: int) -> None:
    buffer.data.copy_(filled(buffer, tuple(buffer.shape), step))


def other_strides(buffer: Tensor, step: int) -> None:
    buffer.data = filled(buffer, (3, 4), step).t() if step % 2 else filled(buffer, (4, 3), step)


def transposed(buffer: Tensor, step: int) -> None:
    buffer.data = filled(buffer, (4, 4), step)
    if step % 2:
        buffer.t_()


class Reads(nn.Module):
    """Reads a buffer whose shape, dtype and strides its forward does not know."""

    def __init__(self, change: Callable[[Tensor, int], None], by_itself: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4).double()
        self.register_buffer("table", torch.ones(4, 3, dtype=torch.float64))
        self.change, self.by_itself, self.step = change, by_itself, 0

    def forward(self, x: Tensor) -> Tensor:
        if self.by_itself:
            with torch.no_grad():
                self.change(self.table, self.step)
        h = torch.tanh(self.layer(x))
        table = self.table.to(h.dtype)
        form = len(table) / 16 + self.table.element_size() / 64
        return h @ table + form + (table.stride(0) < table.stride(1)) / 32

    def training_step(self, x: Tensor) -> Tensor:
        return self(x).square().mean()

    def validation_step(self, x: Tensor) -> Tensor:
        return self(x)


def use(net: Reads, train: Any, look: Any, resync: Any = lambda: None) -> Any:
    """Trains, evaluates, trains again; the buffer changes before each."""
    seen = []
    for step in range(4):
        if not net.by_itself:
            with torch.no_grad():
                net.change(net.table, step)
        net.step = step
        net.train(step != 2)
        if net.training:
            loss = train(inputs())
            loss.backward()
            seen.append(loss.detach())
        else:
            resync()
            with torch.no_grad():
                seen.append(look(inputs()))
        if net.training or not net.by_itself:  # what evaluation leaves on replicas stays there
            seen.append(net.table.cpu().clone())
    return seen


@pytest.mark.parametrize("by_itself", [False, True], ids=["from outside", "by itself"])
@pytest.mark.parametrize(
    "change", [grow, other_dtype, written_without_a_trace, other_strides, transposed]
)
@pytest.mark.parametrize("mode", ["step", "forward"])
def test_a_buffer_that_changes(mode: str, change: Any, by_itself: bool) -> None:
    sizes = (0, 4, 2) if change in (grow, other_strides) else (3, 2, 1)
    one, net = Reads(change, by_itself), Reads(change, by_itself)
    if mode == "forward":
        with engine_of(net, sizes) as spread, spread.spreading():
            actual = use(net, net.training_step, net.validation_step)
    else:
        devices, split = devices_of(3), lambda n: sizes
        engine = StepParallel(net.to(devices[0]), devices, output_device=CPU, split=split)
        actual = use(
            net,
            lambda x: engine.train("training_step", x),
            lambda x: engine.evaluate("validation_step", x),
            engine.resync if change is written_without_a_trace else lambda: None,
        )
        engine.close()
    root = devices_of(1)[0]
    one.to(root)
    expected = use(
        one, lambda x: one.training_step(x.to(root)), lambda x: one.validation_step(x.to(root))
    )
    assert_equal_trees(actual, expected, "results", **EXACT)
    assert_equal_trees(gradients(net), gradients(one), "gradients", **EXACT)
    assert_equal_trees(dict(net.state_dict()), dict(one.state_dict()), "state", **EXACT)
