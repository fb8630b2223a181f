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
    """A compiled function that nobody has on `self`."""
    return x * x


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    COMPILERS.clear()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield
    torch.compiler.reset()


class Base(oracle.Classifier):
    """A classifier whose forward can be spread."""

    def __init__(self) -> None:
        super().__init__()
        self.compile_parts()

    def compile_parts(self) -> None:
        """Compiles something on self."""

    def last(self, x: Tensor) -> Tensor:
        return self.net[2](x).sin()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.net[1](self.net[0](x)))


class Module(Base):
    def compile_parts(self) -> None:
        self.net[2] = compiled(nn.Sequential(nn.Linear(16, 3), nn.Tanh()))


class Whole(oracle.Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.net = compiled(self.net)


class OfModule(Base):
    """A compiled function that knows a part of the module."""

    def compile_parts(self) -> None:
        layer = self.net[2]
        self.functions = [compiled(lambda x: layer(x).sin())]

    def last(self, x: Tensor) -> Tensor:
        return self.functions[0](x)


class Method(Base):
    """A bound method of its own."""

    def compile_parts(self) -> None:
        self.last = compiled(self.last)


class LayersForward(Base):
    """The forward of a layer of torch's own."""

    def compile_parts(self) -> None:
        self.net[0].forward = compiled(self.net[0].forward)


class Decorated(Base):
    """A compiled method of its class."""

    @compiled
    def last(self, x: Tensor) -> Tensor:
        return self.net[2](x).sin()


class Global(Base):
    """A compiled function of its file."""

    def last(self, x: Tensor) -> Tensor:
        return squared(self.net[2](x))


class Last(nn.Sequential):
    """In place, torch compiles no layer of its own."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)
        return x


class InPlace(Base):
    """A part that stays what it is, and is compiled where it is called."""

    def compile_parts(self) -> None:
        self.net[2] = Last(nn.Linear(16, 3), nn.Tanh())
        self.net[2].compile(backend=backend)


class WholeInPlace(Base):
    """Its own call."""

    def compile_parts(self) -> None:
        self.compile(backend=backend)


KINDS = [
    InPlace,
    WholeInPlace,
    Module,
    Whole,
    OfModule,
    Method,
    LayersForward,
    Decorated,
    Global,
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_drop_in(kind: Any) -> None:
    torch.manual_seed(0)
    one, net = kind().double(), kind().double()
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
@pytest.mark.parametrize("compiles", [False, True])
def test_what_no_look_finds_is_noticed_when_it_is_compiled(compiles: bool) -> None:
    """And what is not compiled runs in threads."""
    seen: list[str] = []

    class Helped(oracle.Classifier):
        def on_train_start(self) -> None:
            sine = lambda x: x.sin()
            self.helper = SimpleNamespace(function=compiled(sine) if compiles else sine)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(threading.current_thread().name)
            return super().training_step([self.helper.function(batch[0]), batch[1]], batch_idx)

        @torch.compiler.disable
        def never(self) -> None:
            """No compiled method."""

    strategy = DataParallelStrategy(executor="threads")
    oracle.trainer(3, strategy, max_epochs=1).fit(Helped(), loader(), loader())
    assert "MainThread" not in seen[:3]
    assert ("MainThread" in seen[3:]) == compiles


@pytest.mark.parametrize("how", ["compile()", "torch.compile", "in a function"])
def test_the_drop_in_may_be_compiled_itself(how: str) -> None:
    net, x = nn.Linear(3, 2), torch.randn(5, 3)
    with wrapping() as wrap:
        wrapper = wrap(net, 2)
        if how == "compile()":
            wrapper.compile(backend=backend)
        call = {"compile()": wrapper, "in a function": compiled(lambda x: wrapper(x) * 1)}
        called = call.get(how) or compiled(wrapper)
        torch.testing.assert_close(called(x), net(x), **EXACT)
        assert wrapper.last_sizes == (3, 2)


def test_a_whole_graph_cannot_have_a_spread_call_in_it() -> None:
    class WholeGraph(Base):
        def compile_parts(self) -> None:
            self.loss = torch.compile(self.loss, backend=backend, fullgraph=True)

    job = oracle.trainer(2, DataParallelStrategy(mode="forward"))
    with pytest.raises(Exception, match="leave fullgraph out"):
        job.fit(WholeGraph(), loader(), loader())
