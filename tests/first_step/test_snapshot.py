"""What a module was before is put back, wherever code that ran it has left something."""

import random
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

import numpy as np
import pytest
import torch
from support.oracle import devices_of
from torch import nn

from lightning_dp.first_step.snapshot import ModuleSnapshot
from lightning_dp.parallel.devices import allocated_memory

T = TypeVar("T")


class Queue(Generic[T]):
    def __init__(self) -> None:
        self.items: list[T] = []


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.optimizer = torch.optim.SGD(self.layer.parameters(), 0.1)
        self.tensor = torch.arange(4.0)
        self.array = np.arange(4.0)
        self.list: list[Any] = [1, [2]]
        self.deque: deque[Any] = deque([1, 2], maxlen=2)
        self.set = {1, 2}
        self.count = Counter("abca")
        self.ordered = OrderedDict(a=1, b=2)
        self.default: Any = defaultdict(list, a=[1])
        self.space = SimpleNamespace(x=1)
        self.queue: Queue[int] = Queue()
        self.pair = ([1], {"a": [2]})
        self.own = torch.Generator().manual_seed(3)
        self.lock = threading.Lock()
        self.weight_again = self.layer.weight

    def draw(self) -> list[float]:
        own = torch.rand(1, generator=self.own).item()
        return [own, random.random(), float(np.random.rand()), torch.rand(1).item()]


def state(module: Holder) -> str:
    values = {name: t for name, t in module.state_dict().items()}
    more = module.queue.items, module.norm.training, module.optimizer.param_groups[0]["lr"]
    ids = {name: id(value) for name, value in vars(module).items()}
    inner = id(module.list[1]), id(module.queue.items), id(module.norm.running_mean)
    memory = module.layer.weight.data_ptr(), module.layer.bias.data_ptr()
    return str((vars(module), values, vars(module.space), more, ids, inner, memory))


def everything(module: Any) -> None:
    module.layer.weight.data.add_(1)
    module.layer.bias.data = torch.ones(2)
    module.layer.bias.requires_grad_(False)
    module.norm.running_mean += 1
    module.norm.num_batches_tracked = torch.tensor(9)
    module.norm.eval()
    module.optimizer.param_groups[0]["lr"] = 0.2
    module.tensor[1:].mul_(5)
    module.array[0] = 7
    module.list[1].append(3)
    module.list.insert(0, "new")
    module.deque.extend([3, 4, 5])
    module.set.add(3)
    module.count.update("a")
    module.ordered.move_to_end("a")
    module.default["b"].append(1)
    module.space.x = 2
    module.queue.items.append(4)
    module.pair[0].append(1)
    module.pair[1]["a"].clear()
    module.new = 1
    module.register_buffer("late", torch.ones(1))
    module.add_module("later", nn.Linear(1, 1))
    module.layer.register_forward_hook(lambda *_: None)
    del module.weight_again


def test_everything_is_put_back() -> None:
    module = Holder()
    weight = module.layer.weight
    weight.grad = torch.ones_like(weight)
    weight.register_hook(lambda gradient: gradient * 2)
    pictured = state(module), weight.grad, dict(weight._backward_hooks)
    before = ModuleSnapshot(module, [torch.device("cpu")])
    assert weight.grad is None and not weight._backward_hooks
    numbers = []
    for seed in (None, 1, None):
        if seed is not None:
            before.reseed(seed)
        numbers.append(module.draw())
        everything(module)
        module.layer(torch.ones(1, 2)).sum().backward()
        before.restore()
        assert weight.grad is None
    before.end()
    assert (state(module), weight.grad, dict(weight._backward_hooks)) == pictured
    assert not module.layer._forward_hooks
    assert numbers[0] == numbers[2] == module.draw()
    assert all(a != b for a, b in zip(*numbers[:2], strict=True))


@pytest.mark.usefixtures("on")
def test_values_are_kept_off_the_devices(on: str) -> None:
    device = devices_of(2)[1]
    module = nn.Linear(200, 200).to(device)
    held = allocated_memory(device)
    before = ModuleSnapshot(module, [device])
    assert held == allocated_memory(device)
    numbers = torch.rand(2, device=device)
    module.weight.data.zero_()
    before.end()
    assert torch.equal(torch.rand(2, device=device).cpu(), numbers.cpu())
    assert module.weight.abs().sum() > 0
