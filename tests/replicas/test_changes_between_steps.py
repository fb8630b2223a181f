"""Whatever is changed on a module between two steps, the next step is that of one device."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from support.oracle import Classifier, assert_same, loader, run
from torch import Tensor, nn
from torch.nn import functional as F

pytestmark = pytest.mark.usefixtures("on", "one_thread")


class Block(nn.Module):
    """What its forward reads: an attribute, a buffer, a list, a dict with a list, a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(10, 10)
        self.activation: nn.Module = nn.Tanh()
        self.register_buffer("scale", torch.ones(10))
        self.factor = 1.0
        self.numbers = [0.5]
        self.table: dict[str, list[float]] = {"a": [0.1]}

    def forward(self, x: Tensor) -> Tensor:
        bonus = getattr(self, "bonus", 0.0) + sum(self.numbers) + sum(map(sum, self.table.values()))
        return self.activation(self.layer(x)) * self.scale * self.factor + bonus


class Changing(Classifier):
    """Its steps also fill containers, one of them in a submodule, and bind an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.seen: list[Tensor] = []
        self.kept: dict[str, list[Tensor]] = {"means": []}
        self.sums: list[Tensor] = []
        self.handles: list[Any] = []

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        z = self.net(self.block(x))
        self.seen.append(z.detach().sum(1))
        self.kept["means"].append(z.detach().mean(1))
        return F.cross_entropy(z, y)

    def on_train_batch_end(self, *args: Any) -> None:
        kept = [torch.cat(items).cpu().sum() for items in (self.seen, self.kept["means"]) if items]
        self.sums.append(torch.stack([torch.tensor(float(len(self.seen))), *kept]))


def new_parameter(net: Changing) -> None:
    net.block.layer.weight = nn.Parameter(0.5 * net.block.layer.weight.detach().clone())


def bind_data(net: Changing) -> None:
    net.block.layer.weight.data = 0.9 * net.block.layer.weight.data


def write_through_data(net: Changing) -> None:
    net.net[0].weight.data.mul_(0.9)


def toggle_grad(net: Changing) -> None:
    net.net[0].requires_grad_(not net.net[0].weight.requires_grad)


def assign_buffer(net: Changing) -> None:
    net.block.scale = net.block.scale + 0.1


def write_buffer(net: Changing) -> None:
    net.block.scale.add_(0.1)


def new_buffer(net: Changing) -> None:
    net.block.register_buffer("bonus", torch.full((1,), 0.2, device=net.device))


def bind_attribute(net: Changing) -> None:
    net.block.factor *= 0.9


def add_or_remove_attribute(net: Changing) -> None:
    if hasattr(net.block, "bonus"):
        del net.block.bonus
    else:
        net.block.bonus = 0.3


def add_or_remove_hook(net: Changing) -> None:
    if net.handles:
        net.handles.pop().remove()
    else:
        net.handles.append(net.block.layer.register_forward_hook(lambda m, args, y: 1.1 * y))


def fill_list(net: Changing) -> None:
    net.block.numbers.append(0.01)


def change_entry(net: Changing) -> None:
    net.block.numbers[0] += 0.01


def fill_inner_list(net: Changing) -> None:
    net.block.table["a"].append(0.02)


def new_key(net: Changing) -> None:
    net.block.table[f"key {len(net.block.table)}"] = [0.03]


def swap_containers(net: Changing) -> None:
    net.block.numbers, net.block.table = [0.2], {"b": [0.1]}


def clear(net: Changing) -> None:
    net.seen.clear()
    net.kept = {"means": []}


def swap_submodule(net: Changing) -> None:
    net.block.activation = nn.Sigmoid()


def swap_block(net: Changing) -> None:
    torch.manual_seed(1)
    net.block = Block().to(net.device)


CHANGES: list[Callable[[Changing], None]] = [
    new_parameter,
    bind_data,
    write_through_data,
    toggle_grad,
    assign_buffer,
    write_buffer,
    new_buffer,
    bind_attribute,
    add_or_remove_attribute,
    add_or_remove_hook,
    fill_list,
    change_entry,
    fill_inner_list,
    new_key,
    swap_containers,
    clear,
    swap_submodule,
    swap_block,
]


class Changes(Callback):
    """Makes some of the changes after every batch, the same in every run."""

    def __init__(self, seed: int, changes: list[Callable[[Changing], None]]) -> None:
        self.random = random.Random(seed)
        self.changes = changes

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        for _ in range(self.random.randint(0, 3)):
            change = self.random.choice(self.changes)
            if change is not new_buffer or not hasattr(module.block, "bonus"):
                change(module)


def check(seed: int, changes: list[Callable[[Changing], None]], **strategy: Any) -> None:
    torch.set_default_dtype(torch.float64)
    options: dict[str, Any] = {"data": lambda: loader(60, 12), "max_epochs": 1}
    several = run(Changing, 3, strategy=strategy, callbacks=[Changes(seed, changes)], **options)
    one = run(Changing, 1, callbacks=[Changes(seed, changes)], **options)
    assert_same(several, one)
    for actual, expected in zip(several.module.sums, one.module.sums, strict=True):
        torch.testing.assert_close(actual.cpu(), expected.cpu())


@pytest.mark.parametrize("change", CHANGES)
def test_each_change_alone(change: Callable[[Changing], None]) -> None:
    check(0, [change], executor="inorder")


@pytest.mark.parametrize("seed, executor", [(0, "inorder"), (1, "threads"), (2, "threads")])
def test_any_changes_in_any_order(seed: int, executor: str) -> None:
    check(seed, CHANGES, executor=executor)
