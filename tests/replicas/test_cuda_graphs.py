"""Compiled code that makes CUDA graphs: what they return for one replica is there to the end.

Graphs write over what they have returned as soon as compiled code is called for another batch; that
of another replica is none. Only GPUs have graphs.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support import oracle
from support.oracle import ByHand, assert_same, run
from torch import Tensor

pytestmark = [
    pytest.mark.on("cuda"),
    pytest.mark.usefixtures("on", "fresh_compiler"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch.compile's own imports
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty"),  # torch begins with such a one
]


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    torch.set_default_dtype(torch.float64)
    yield
    torch.compiler.reset()


class Graphs(oracle.Classifier):
    """The last layer is a graph; its outputs are those of forward, predictions, and in logs."""

    def __init__(self) -> None:
        super().__init__()
        self.last = torch.compile(self.last, mode="reduce-overhead")

    def last(self, x: Tensor) -> Tensor:
        return self.net[2](x)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.net[1](self.net[0](x)))


class GraphsByHand(ByHand, Graphs):
    """Its replicas meet in the step."""


class PlainByHand(ByHand, oracle.Classifier):
    """What it is compared with."""


CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "step": (Graphs, oracle.Classifier, {}),
    "forward": (Graphs, oracle.Classifier, {"mode": "forward"}),
    "by hand": (GraphsByHand, PlainByHand, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_as_one_device(case: str) -> None:
    from torch._inductor import cudagraph_trees

    graphs, plain, options = CASES[case]
    several = run(graphs, 3, strategy=options)
    manager = cudagraph_trees.get_manager(0, create_if_none_exists=False)
    assert manager is not None and any(manager.roots.values())
    assert_same(several, run(plain, 1))
