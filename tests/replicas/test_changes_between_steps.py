"""Whatever is changed on a module between two steps, the next step is that of one device."""

import random
from collections.abc import Callable, Sequence
from operator import attrgetter
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
        self.register_buffer("rows", torch.ones(4, 3))
        self.factor = 1.0
        self.numbers = [0.5]
        self.table: dict[str, list[float]] = {"a": [0.1]}

    def forward(self, x: Tensor) -> Tensor:
        bonus = (
            getattr(self, "bonus", 0.0)
            + self.rows.mean().to(x.dtype) * (len(self.rows) + self.rows.element_size()) / 64
            + getattr(self, "offset", 0.0)
            + sum(self.numbers)
            + sum(map(sum, self.table.values()))
        )
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


def toggle(net: Any, name: str, value: Any) -> None:
    """Sets an attribute, or deletes it again."""
    net.__delattr__(name) if hasattr(net, name) else net.__setattr__(name, value)


def add_or_remove_hook(net: Changing) -> None:
    if net.handles:
        net.handles.pop().remove()
    else:
        net.handles.append(net.block.layer.register_forward_hook(lambda m, args, y: 1.1 * y))


def new_block(net: Changing) -> Block:
    torch.manual_seed(1)
    return Block().to(net.device)


def bind(name: str, make: Callable[[Changing], Any]) -> Callable[[Changing], None]:
    """Binds what is at a path anew."""
    path, _, last = name.rpartition(".")
    return lambda net: setattr(attrgetter(path)(net) if path else net, last, make(net))


CHANGES: dict[str, Callable[[Changing], Any]] = {
    "new parameter": bind(
        "block.layer.weight",
        lambda net: nn.Parameter(0.5 * net.block.layer.weight.detach().clone()),
    ),
    "bind data": bind("block.layer.weight.data", lambda net: 0.9 * net.block.layer.weight.data),
    "write through data": lambda net: net.net[0].weight.data.mul_(0.9),
    "toggle grad": lambda net: net.net[0].requires_grad_(not net.net[0].weight.requires_grad),
    "assign buffer": bind("block.scale", lambda net: net.block.scale + 0.1),
    "write buffer": lambda net: net.block.scale.add_(0.1),
    "new buffer": lambda net: net.block.register_buffer(
        "offset", torch.full((1,), 0.2, device=net.device)
    ),
    "buffer of another shape": lambda net: net.block.rows.resize_(len(net.block.rows) + 2, 3).fill_(
        0.1
    ),
    "buffer of another dtype": bind("block.rows.data", lambda net: net.block.rows.data.half()),
    "bind attribute": bind("block.factor", lambda net: 0.9 * net.block.factor),
    "add or remove attribute": lambda net: toggle(net.block, "bonus", 0.3),
    "add or remove hook": add_or_remove_hook,
    "fill list": lambda net: net.block.numbers.append(0.01),
    "change entry": lambda net: net.block.numbers.__setitem__(0, net.block.numbers[0] + 0.01),
    "fill inner list": lambda net: net.block.table.setdefault("a", []).append(0.02),
    "new key": lambda net: net.block.table.update({f"key {len(net.block.table)}": [0.03]}),
    "swap list": bind("block.numbers", lambda net: [0.2]),
    "swap dict": bind("block.table", lambda net: {"b": [0.1]}),
    "clear": lambda net: net.seen.clear(),
    "swap submodule": bind("block.activation", lambda net: nn.Sigmoid()),
    "swap block": bind("block", new_block),
}


class Changes(Callback):
    """Makes some of the changes after every batch, the same in every run."""

    def __init__(self, seed: int, changes: Sequence[Callable[[Changing], Any]]) -> None:
        self.random, self.changes = random.Random(seed), changes

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        for _ in range(self.random.randint(0, 3)):
            self.random.choice(self.changes)(module)


CASES: list[Any] = [
    *(pytest.param(0, [change], {"executor": "inorder"}, id=n) for n, change in CHANGES.items()),
    pytest.param(1, [*CHANGES.values()], {"executor": "threads"}, id="any"),
    pytest.param(
        2,
        [*CHANGES.values()],
        {"mode": "forward", "parallel_modules": ["block"]},
        id="any, forward",
    ),
]


@pytest.mark.parametrize("seed, changes, strategy", CASES)
def test_changes(seed: int, changes: Any, strategy: dict[str, Any]) -> None:
    torch.set_default_dtype(torch.float64)
    options: dict[str, Any] = {"data": lambda: loader(60, 12), "max_epochs": 1}
    several = run(Changing, 3, strategy=strategy, callbacks=[Changes(seed, changes)], **options)
    one = run(Changing, 1, callbacks=[Changes(seed, changes)], **options)
    assert_same(several, one)
    for actual, expected in zip(several.module.sums, one.module.sums, strict=True):
        torch.testing.assert_close(actual.cpu(), expected.cpu())
