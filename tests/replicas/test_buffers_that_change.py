"""Buffers that get another shape, dtype, layout or memory and stay the same object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.forward_twins import EXACT, engine_of, inputs, update
from support.oracle import assert_equal_trees, devices_of, gradients
from torch import Tensor, nn

from lightning_dp.parallel.step import StepParallel

pytestmark = pytest.mark.usefixtures("on")

CPU = torch.device("cpu")
Change = Callable[[Tensor, int], Any]


def filled(buffer: Tensor, shape: tuple[int, ...], step: int, **options: Any) -> Tensor:
    values = torch.arange(1.0, 1 + torch.Size(shape).numel(), dtype=torch.float64) / (step + 4)
    return values.view(shape).to(buffer.device, **options)


def grow(buffer: Tensor, step: int) -> None:
    buffer.resize_(4, 2 + step).copy_(filled(buffer, (4, 2 + step), step))


def other_data(buffer: Tensor, step: int) -> None:
    buffer.data = filled(buffer, (4, 3), step)


def data_of_other_dtype(buffer: Tensor, step: int) -> None:
    buffer.data = filled(buffer, (4, 3), step, dtype=torch.float32 if step % 2 else torch.float64)


def data_written_without_a_trace(buffer: Tensor, step: int) -> None:
    buffer.data.copy_(filled(buffer, tuple(buffer.shape), step))


def other_strides(buffer: Tensor, step: int) -> None:
    buffer.data = filled(buffer, (3, 4), step).t() if step % 2 else filled(buffer, (4, 3), step)


def transposed(buffer: Tensor, step: int) -> None:
    buffer.data = filled(buffer, (4, 4), step)
    if step % 2:
        buffer.t_()


CHANGES: list[Change] = [
    grow,
    other_data,
    data_of_other_dtype,
    data_written_without_a_trace,
    other_strides,
    transposed,
]


class Reads(nn.Module):
    """Reads a buffer whose shape, dtype and strides its forward does not know."""

    def __init__(self, change: Change, *, by_itself: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4).double()
        self.register_buffer("table", torch.ones(4, 3, dtype=torch.float64))
        self.register_buffer("constant", torch.full((4,), 0.5, dtype=torch.float64))
        self.change, self.by_itself = change, by_itself
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.by_itself:
            with torch.no_grad():
                self.change(self.table, self.step)
        h = torch.tanh(self.layer(x)) + self.constant
        table = self.table.to(h.dtype)
        told = len(table) / 16 + self.table.element_size() / 64
        told += (table.dim() > 1 and table.stride(0) < table.stride(1)) / 32
        return h[:, : len(table)] @ table + told if len(table) else h

    def training_step(self, x: Tensor) -> Tensor:
        y = self(x)
        return y.square().mean()

    def validation_step(self, x: Tensor) -> Tensor:
        return self(x)


def use(
    net: Reads,
    train: Callable[[Tensor], Tensor],
    look: Callable[[Tensor], Any],
    resync: Callable[[], None] = lambda: None,
) -> Any:
    """Trains, evaluates, trains again; the buffer changes before each."""
    seen = []
    for step in range(4):
        if not net.by_itself:
            with torch.no_grad():
                net.change(net.table, step)
        net.step = step
        if step == 2:
            net.eval()
            resync()
            with torch.no_grad():
                seen.append(look(inputs()))
        else:
            net.train()
            loss = train(inputs())
            loss.backward()
            seen.append(loss.detach())
        if net.training or not net.by_itself:  # what evaluation leaves on replicas stays there
            seen.append(net.table.cpu().clone())
    return seen


def assert_as_one_device(make: Callable[[], Reads], actual: Any, net: Reads) -> None:
    one = make().to(devices_of(1)[0])
    place = one.layer.weight.device
    expected = use(
        one, lambda x: one.training_step(x.to(place)), lambda x: one.validation_step(x.to(place))
    )
    assert_equal_trees(actual, expected, "results", **EXACT)
    assert_equal_trees(gradients(net), gradients(one), "gradients", **EXACT)
    assert_equal_trees(dict(net.state_dict()), dict(one.state_dict()), "state", **EXACT)
    assert net.table.dtype == one.table.dtype


def step_engine(net: nn.Module, sizes: tuple[int, ...], **options: Any) -> StepParallel:
    devices = devices_of(len(sizes))
    split: Any = lambda n: sizes
    return StepParallel(net.to(devices[0]), devices, output_device=CPU, split=split, **options)


@pytest.mark.parametrize("by_itself", [False, True], ids=["from outside", "by itself"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("mode", ["step", "forward"])
def test_a_buffer_that_changes(mode: str, change: Change, by_itself: bool) -> None:
    sizes = (0, 4, 2) if change in (grow, other_strides) else (3, 2, 1)
    net = Reads(change, by_itself=by_itself)
    if mode == "forward":
        with engine_of(net, sizes) as spread, spread.spreading():
            actual = use(net, net.training_step, net.validation_step)
    else:
        engine = step_engine(net, sizes)
        actual = use(
            net,
            lambda x: engine.train("training_step", x),
            lambda x: engine.evaluate("validation_step", x),
            engine.resync if change is data_written_without_a_trace else lambda: None,
        )
        engine.close()
    assert_as_one_device(lambda: Reads(change, by_itself=by_itself), actual, net)


class Observed(nn.Module):
    """Quantisation-aware training by hand: observers resize what they keep in their first step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3).double()
        for name in ("low", "high", "scale"):
            self.register_buffer(name, torch.tensor([], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        w = self.layer.weight
        with torch.no_grad():
            low, high = w.detach().aminmax(dim=1)
            if self.low.numel() == 0:
                self.low.resize_(low.shape).copy_(low)
                self.high.resize_(high.shape).copy_(high)
            self.low.copy_(0.9 * self.low + 0.1 * low)
            self.high.copy_(0.9 * self.high + 0.1 * high)
            self.scale.resize_(high.shape).copy_((self.high - self.low) / 15)
        rounded = (w / self.scale[:, None]).round() * self.scale[:, None]
        return nn.functional.linear(x, w + (rounded - w).detach(), self.layer.bias)

    def training_step(self, x: Tensor) -> Tensor:
        return (self(x) - 1).square().mean()


@pytest.mark.parametrize("mode, executor", [("step", "inorder"), ("forward", "threads")])
def test_observers(mode: str, executor: Any) -> None:
    sizes = (3, 2, 1)

    def train(net: nn.Module, loss_of: Callable[[Tensor], Tensor]) -> Any:
        losses = []
        for seed in range(4):
            loss = loss_of(inputs(seed=seed))
            loss.backward()
            losses.append(loss.detach().cpu())
            update(net)
        return losses

    one, net = Observed(), Observed()
    if mode == "forward":
        with engine_of(net, sizes, executor=executor) as spread, spread.spreading():
            actual = train(net, net.training_step)
    else:
        engine = step_engine(net, sizes, executor=executor)
        actual = train(net, lambda x: engine.train("training_step", x))
        engine.close()
    assert_equal_trees(actual, train(one, one.training_step), "losses", **EXACT)
    assert_equal_trees(dict(net.state_dict()), dict(one.state_dict()), "state", **EXACT)
