"""What a replica is: a copy of the root by identity, as `copy.deepcopy` makes it, that follows it.

A row is a law: what makes a module, and what is then true of it and of a replica.
"""

from __future__ import annotations

import io
import threading
import weakref
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from support.oracle import devices_of
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm
from torch.utils.data import TensorDataset

from lightning_dp.parallel.replicate import Replicas

pytestmark = [
    pytest.mark.usefixtures("on", "one_thread"),
    pytest.mark.filterwarnings("ignore:.*(weight_norm|spectral_norm).*:FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch.compile's own imports
]


class Net(nn.Module):
    """Two layers, and attributes that a row adds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x * self.scale))


class Task:
    """A plain object that knows the module."""

    def __init__(self, model: Any) -> None:
        self.model, self.items = model, [1]


@dataclass(slots=True)
class Slotted:
    """A plain object without a `__dict__`."""

    layer: Any


class Pair(NamedTuple):
    """A named tuple."""

    layer: Any
    name: str


class Scaled(nn.Parameter):
    """A class of parameters."""


class Trainer(Task):
    """Stands for Lightning's, which knows the module and is shared."""

    __module__ = "lightning.pytorch"


class Hooked(nn.Linear):
    """A layer with a hook that is its own method."""

    def __init__(self) -> None:
        super().__init__(3, 4)
        self.register_forward_hook(self.keep)

    def keep(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.kept = output


def laws(add: Callable[[Net], Any], *statements: Callable[[Any, Any], bool]) -> Any:
    return add, statements


def with_attributes(**attributes: Callable[[Net], Any]) -> Callable[[Net], None]:
    """Sets attributes one after another."""

    def add(net: Net) -> None:
        for name, make in attributes.items():
            setattr(net, name, make(net))

    return add


def scaled_parameter(net: Net) -> None:
    net.first.weight = Scaled(net.first.weight.detach())
    net.first.weight.scale = 5.0
    net.first.weight.knows = [net.last]


def hook_with_cell(net: Net) -> None:
    layer, net.seen, counts = net.last, [], []
    kept = net.seen

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        kept.append(layer)
        counts.append(1)

    net.first.register_forward_hook(hook)
    net.counts = lambda: counts


def seen_by_hook(net: Any) -> Any:
    net(torch.zeros(1, 3, device=net.scale.device))
    return net.seen


def recursive_function(net: Net) -> None:
    def walk(depth: int) -> Any:
        return walk(depth - 1) if depth else net.first

    net.walk = walk


def shared_cell(net: Net) -> None:
    layer = net.first

    def get() -> Any:
        return layer

    def put(value: Any) -> None:
        nonlocal layer
        layer = value

    net.get, net.put = get, put


def same(name: str) -> Callable[[Any, Any], bool]:
    return lambda net, own: getattr(own, name) is getattr(net, name)


def graph(net: Net) -> Tensor:
    return net.first.weight.sum() * 2


LAWS = {
    "containers under several names": laws(
        with_attributes(a=lambda net: {"x": [1]}, b=lambda net: (net.a, net.a["x"])),
        lambda net, own: own.b[0] is own.a is not net.a,
        lambda net, own: own.b[1] is own.a["x"] is not net.a["x"] and own.b[1] == [1],
    ),
    "kinds of containers": laws(
        with_attributes(
            kinds=lambda net: [
                OrderedDict(a=1),
                defaultdict(list, a=[1]),
                deque([1], maxlen=3),
                {1, 2},
                Pair(net.first, "first"),
            ]
        ),
        lambda net, own: list(map(type, own.kinds)) == list(map(type, net.kinds)),
        lambda net, own: own.kinds[:4] == net.kinds[:4] and own.kinds[2].maxlen == 3,
        lambda net, own: own.kinds[1]["b"] == [] and own.kinds[4].layer is own.first,
    ),
    "tied weights": laws(
        lambda net: (
            setattr(net.first, "weight", nn.Parameter(torch.ones(4, 3)))
            or setattr(net, "tied", nn.Linear(3, 4))
            or setattr(net.tied, "weight", net.first.weight)
            or setattr(net, "again", net.first)
        ),
        lambda net, own: own.tied.weight is own.first.weight is not net.first.weight,
        lambda net, own: own.again is own.first,
    ),
    "a parameter's class and attributes": laws(
        scaled_parameter,
        lambda net, own: type(own.first.weight) is Scaled and own.first.weight.is_leaf,
        lambda net, own: own.first.weight.scale == 5.0 and own.first.weight.knows == [own.last],
    ),
    "an object that knows the module, and that a layer knows": laws(
        lambda net: setattr(net, "task", Task(net)) or setattr(net.last, "task", net.task),
        lambda net, own: own.task.model is own and own.task is own.last.task is not net.task,
        lambda net, own: own.task.items is not net.task.items,
    ),
    "other objects that know a layer": laws(
        with_attributes(
            objects=lambda net: [
                Slotted(net.first),
                SimpleNamespace(layer=net.first),
                UserDict(layer=net.first),
            ]
        ),
        lambda net, own: own.objects[0].layer is own.first is own.objects[1].layer,
        lambda net, own: own.objects[2]["layer"] is own.first,
    ),
    "a hook that is a method": laws(
        lambda net: setattr(net, "first", Hooked()),
        lambda net, own: own(own.scale[None]) is not None and hasattr(own.first, "kept"),
        lambda net, own: not hasattr(net.first, "kept"),
    ),
    "references to layers and weights": laws(
        with_attributes(
            order=lambda net: [net.last, net.first],
            by_name=lambda net: {"weight": net.first.weight, net.first: net.scale},
            weak=lambda net: weakref.ref(net.first),
        ),
        lambda net, own: own.order[0] is own.last and own.order[1] is own.first,
        lambda net, own: own.by_name["weight"] is own.first.weight,
        lambda net, own: own.by_name[own.first] is own.scale and own.weak() is own.first,
    ),
    "bound methods, partials and functions": laws(
        with_attributes(
            method=lambda net: net.first.forward,
            part=lambda net: partial(net.last.forward, net.scale),
            function=lambda net: lambda: net.first,
        ),
        lambda net, own: own.method.__self__ is own.first,
        lambda net, own: own.part.func.__self__ is own.last and own.part.args[0] is own.scale,
        lambda net, own: own.function() is own.first,
    ),
    "a function that calls itself": laws(
        recursive_function, lambda net, own: own.walk(2) is own.first
    ),
    "two functions with one variable": laws(
        shared_cell,
        lambda net, own: own.get() is own.first and own.put(1) is None and own.get() == 1,
        lambda net, own: net.get() is net.first,
    ),
    "a hook with a list of the module's, and a counter": laws(
        hook_with_cell,
        lambda net, own: seen_by_hook(own) == [own.last] and net.seen == [],
        lambda net, own: own.counts() is net.counts() and net.counts() == [1],
    ),
    "weight norm": laws(
        lambda net: setattr(net, "first", parametrizations.weight_norm(net.first)),
        lambda net, own: type(own.first) is type(net.first),
        lambda net, own: own.first.parametrizations is not net.first.parametrizations,
    ),
    "weight norm of old": laws(lambda net: weight_norm(net.first) and None),
    "spectral norm": laws(
        lambda net: setattr(net, "first", parametrizations.spectral_norm(net.first).eval())
    ),
    "spectral norm of old": laws(lambda net: spectral_norm(net.first).eval() and None),
    "flat weights of an LSTM": laws(
        with_attributes(rnn=lambda net: nn.LSTM(3, 2).to(net.scale.device)),
        lambda net, own: all(map(lambda a, b: a is b, own.rnn._flat_weights, own.rnn.parameters())),
    ),
    **{
        f"what is shared: {name}": laws(with_attributes(shared=make), same("shared"))
        for name, make in {
            "an object": lambda net: Task(None),
            "the trainer": Trainer,
            "a lock": lambda net: threading.Lock(),
            "a file": lambda net: io.StringIO("text"),
            "values of threads": lambda net: threading.local(),
            "a thread": lambda net: threading.Thread(target=net.forward),
            "an array": lambda net: np.zeros(1000),
            "a data set": lambda net: TensorDataset(torch.zeros(9)),
            "an optimizer": lambda net: torch.optim.SGD(net.parameters(), 0.1),
            "a generator": lambda net: torch.Generator(net.scale.device),
        }.items()
    },
    "a tensor": laws(
        with_attributes(
            x=lambda net: torch.ones(2, device=net.scale.device), y=lambda net: [net.x]
        ),
        lambda net, own: own.x.device == own.scale.device and own.y[0] is own.x,
        lambda net, own: (own.x is net.x) == (own.scale.device == net.scale.device),
    ),
    "a tensor with a graph": laws(
        with_attributes(kept=graph, kepts=lambda net: [graph(net)]),
        lambda net, own: own.kept.grad_fn is None and own.kept.device == own.scale.device,
        lambda net, own: own.kepts[0] is net.kepts[0],
    ),
    "a compiled function": laws(
        with_attributes(f=lambda net: torch.compile(lambda x: net.last(x), backend="eager")),
        lambda net, own: own.f is not net.f,
    ),
    "a compiled layer": laws(
        with_attributes(compiled=lambda net: torch.compile(net.last, backend="eager")),
        lambda net, own: own.compiled._orig_mod is own.last,
    ),
}


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("later", [False, True], ids=["at first", "later"])
@pytest.mark.parametrize("places", [(0, 0), (0, 1)], ids=["same device", "other device"])
def test_law(law: str, places: tuple[int, int], later: bool) -> None:
    devices = devices_of(2)
    add, statements = LAWS[law]
    net = Net().to(devices[0])
    if later:
        replicas = Replicas(net, [devices[i] for i in places])
        replicas.refresh()
    if law.startswith(("weight norm", "spectral norm")):
        net.cpu()
    add(net)
    net.to(devices[0])
    if not later:
        replicas = Replicas(net, [devices[i] for i in places])
    replicas.refresh()
    own = replicas.modules[1]
    own_parameters = set(map(id, own.parameters()))
    assert own_parameters.isdisjoint(map(id, net.parameters()))
    on_the_roots = own.last.weight.data_ptr() == net.last.weight.data_ptr()
    assert on_the_roots is (devices[0] == devices[places[1]])
    for i, statement in enumerate(statements):
        assert statement(net, own), f"statement {i}"
    # It computes what the root does, with parameters of its own.
    x = torch.randn(5, 3, device=devices[0])
    expected, output = net(x), own(x.to(own.scale.device))
    torch.testing.assert_close(output.cpu(), expected.cpu())
    output.sum().backward()
    assert all(p.grad is None for p in net.parameters())
    assert any(p.grad is not None for p in own.parameters())


@pytest.mark.parametrize("place", [0, 1])
def test_a_layer_that_is_not_registered_is_copied_too(place: int) -> None:
    devices = devices_of(2)
    net = Net().to(devices[0])
    net.hidden = [nn.Linear(3, 3).to(devices[0])]
    own = Replicas(net, [devices[0], devices[place]]).modules[1]
    assert own.hidden[0].weight is not net.hidden[0].weight
    assert own.hidden[0].weight.device == devices[place]


def test_what_has_the_id_of_a_buffer_that_is_gone_is_not_taken_for_it() -> None:
    net = Net().to(devices_of(1)[0])
    replicas = Replicas(net, devices_of(1) * 2)
    for _ in range(20):
        net.scale = net.scale + 0.1  # which frees the one before
        net.kept = [net.scale.detach() for _ in range(9)]
        replicas.refresh(buffers="all")
        assert all(map(lambda a, b: a is b, replicas.modules[1].kept, net.kept))
