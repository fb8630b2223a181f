"""Modules with compiled parts: their replicas compute with their own weights, compile in order, and
do not use up dynamo's limit of recompilations together.

The simulated devices cannot compile; a graph for each of many devices is played by `dynamic=False`,
which makes one for each size.
"""

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import oracle
from support.forward_twins import EXACT, inputs, wrapping
from support.oracle import assert_equal_trees, gradients, loader
from torch import Tensor, nn

from lightning_dp import DataParallelStrategy

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch.compile's own imports
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

COMPILERS: list[str] = []
"""The threads that have compiled a graph."""


def backend(graph: Any, examples: Any) -> Any:
    """As the backend "eager"."""
    COMPILERS.append(threading.current_thread().name)
    return graph.forward


compiled: Callable[..., Any] = torch.compile(backend=backend)


@compiled
def squared(x: Tensor) -> Tensor:
    """A compiled function that no module has on `self`."""
    return x * x


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    COMPILERS.clear()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield
    torch.compiler.reset()


class Net(oracle.Classifier):
    """A classifier whose forward can be spread."""

    def last(self, x: Tensor) -> Tensor:
        return self.net[2](x).sin()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.net[1](self.net[0](x)))


class Decorated(Net):
    @compiled
    def last(self, x: Tensor) -> Tensor:
        return self.net[2](x).sin()


class Global(Net):
    def last(self, x: Tensor) -> Tensor:
        return squared(self.net[2](x))


class Last(nn.Sequential):
    """In place, torch compiles no layer of its own."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)
        return x


def in_place() -> Net:
    net = Net()
    net.net[2] = Last(nn.Linear(16, 3), nn.Tanh())
    net.net[2].compile(backend=backend)
    return net


def that_knows_a_layer() -> Net:
    net = Net()
    layer = net.net[2]
    net.functions = [compiled(lambda x: layer(x).sin())]
    net.last = lambda x: net.functions[0](x)
    return net


def with_parts(change: Callable[[Net], object]) -> Callable[[], Net]:
    def make() -> Net:
        net = Net()
        change(net)
        return net

    return make


KINDS: dict[str, Callable[[], Net]] = {
    "a layer": with_parts(lambda net: net.net.__setitem__(2, compiled(nn.Linear(16, 3)))),
    "a layer in place": in_place,
    "the whole module in place": with_parts(lambda net: net.compile(backend=backend)),
    "a function on self that knows a layer": that_knows_a_layer,
    "a bound method": with_parts(lambda net: setattr(net, "last", compiled(net.last))),
    "a layer's forward": with_parts(
        lambda net: setattr(net.net[0], "forward", compiled(net.net[0].forward))
    ),
    "a method of the class": Decorated,
    "a global function": Global,
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_drop_in(kind: str) -> None:
    torch.manual_seed(0)
    one, net = KINDS[kind]().double(), KINDS[kind]().double()
    net.load_state_dict(one.state_dict())
    with wrapping() as wrap:
        wrapper = wrap(net, 3, executor="threads")
        for seed in range(2):
            for module in (one, wrapper):
                module(inputs(7, 10, seed=seed)).exp().sum().backward()
    assert_equal_trees(gradients(net), gradients(one), "gradients", **EXACT)
    assert set(COMPILERS) == {"MainThread"}


def test_many_graphs_for_many_replicas() -> None:
    """On one device there are two; on eight there are more than dynamo's limit of eight."""

    class Static(oracle.Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.net[1] = torch.compile(nn.Tanh(), backend=backend, dynamic=False)
            self.function = torch.compile(torch.sin, backend=backend, dynamic=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(self.function(x))

    options: Any = {"weights": list(range(1, 9)), "executor": "threads"}
    limit = torch._dynamo.config.recompile_limit
    job = oracle.trainer(8, DataParallelStrategy(**options), max_epochs=1)
    job.fit(Static(), oracle.loader(120, 50), oracle.loader(4))
    assert len(COMPILERS) > 2 * limit == 16 and set(COMPILERS) == {"MainThread"}
    assert torch._dynamo.config.recompile_limit == limit


@pytest.mark.usefixtures("unchecked")
def test_what_no_look_finds_is_noticed_when_it_is_compiled() -> None:
    seen: list[str] = []

    class Helped(oracle.Classifier):
        def on_train_start(self) -> None:
            self.helper = SimpleNamespace(function=compiled(lambda x: x.sin()))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(threading.current_thread().name)
            return super().training_step([self.helper.function(batch[0]), batch[1]], batch_idx)

    strategy = DataParallelStrategy(executor="threads")
    oracle.trainer(3, strategy, max_epochs=1).fit(Helped(), loader(), loader())
    assert "MainThread" not in seen[:3] and "MainThread" in seen[3:]


@pytest.mark.parametrize("how", ["compile()", "torch.compile"])
def test_the_drop_in_may_be_compiled_itself(how: str) -> None:
    net, x = nn.Linear(3, 2), torch.randn(5, 3)
    with wrapping() as wrap:
        wrapper = wrap(net, 2)
        if how == "compile()":
            wrapper.compile(backend=backend)
        called = wrapper if how == "compile()" else compiled(wrapper)
        torch.testing.assert_close(called(x), net(x), **EXACT)
        assert wrapper.last_sizes == (3, 2)


def test_a_whole_graph_cannot_have_a_spread_call_in_it() -> None:
    module = Net()
    module.loss = torch.compile(module.loss, backend=backend, fullgraph=True)
    job = oracle.trainer(2, DataParallelStrategy(mode="forward"))
    with pytest.raises(Exception, match="leave fullgraph out"):
        job.fit(module, loader(), loader())
