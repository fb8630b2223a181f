"""A forked child has none of its parent's threads: what it calls makes them anew."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dp import DataParallel
from lightning_dp.parallel.apply import collectives

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),  # Python 3.12, beside threads
    pytest.mark.usefixtures("one_thread"),  # OpenMP's threads do not survive a fork either
]


class Net(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + collectives.reduce(x.mean())


def in_child(check: Callable[[], Any]) -> None:
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        code = 1
        try:
            code = 0 if check() else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("executor", ["threads", "inorder"])
def test_a_child_computes_what_its_parent_does(executor: Any) -> None:
    x, net = torch.randn(6, 4, dtype=torch.float64), Net(4, 3).double()
    with closing(DataParallel(net, ["cpu"] * 3, executor=executor)) as wrapper:
        expected = wrapper(x)
        same = lambda: torch.equal(wrapper(x), expected)
        for _ in range(4):  # whose workers' first forwards must not all make autograd's engine anew
            in_child(same)
        in_child(lambda: in_child(same) or True)  # and its own child
        assert same()
