"""The primitives and the drop-in's stages, in loops of one's own: an error in them leaves the
calling thread its state."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support import oracle
from support.fault_cases import Setting, thread_state, threads_left
from support.forward_twins import inputs, perceptron
from support.oracle import devices_of
from torch import Tensor, nn

from lightning_dp import DataParallel, gather, parallel_apply, replicate, scatter

pytestmark = pytest.mark.usefixtures("on", "one_thread")
K = 2
KEPT: list[DataParallel] = []
"""Wrappers, which are closed where nobody interrupts."""


def close_all() -> None:
    while KEPT:
        KEPT.pop().close()


class OwnStages(DataParallel):
    """Has a stage of its own, so that all of them are called one by one."""

    def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> list[Any]:
        return super().parallel_apply(replicas, inputs, kwargs)


class Failing(nn.Module):
    """Its second replica fails."""

    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron().double()

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 2:
            raise ValueError("the user's own")
        return self.net(x)


def loop(net: nn.Module, x: Tensor) -> None:
    devices = devices_of(K)
    replicas = replicate(net, devices)
    outputs = parallel_apply(replicas, scatter(x, devices))
    gather(outputs, devices[0]).square().sum().backward()


def own_stages(net: nn.Module, x: Tensor) -> None:
    wrapper = OwnStages(net, devices_of(K), executor="inorder")
    KEPT.append(wrapper)
    wrapper(x).square().sum().backward()


def stage_by_stage(net: nn.Module, x: Tensor) -> None:
    wrapper = DataParallel(net, devices_of(K), executor="inorder")
    KEPT.append(wrapper)
    ids = wrapper.device_ids
    args, named = wrapper.scatter((x,), {}, ids)
    wrapper.gather(
        wrapper.parallel_apply(wrapper.replicate(net, ids), args, named), wrapper.output_device
    )


WAYS: dict[str, Callable[[nn.Module, Tensor], None]] = {
    "loop": loop,
    "own stages": own_stages,
    "stage by stage": stage_by_stage,
}


@contextlib.contextmanager
def much_of_its_own(on: str) -> Iterator[Callable[[], dict[str, Any]]]:
    """In here a thread has state of its own; gives what looks at it."""
    setting = Setting("drop-in", on=on)
    with torch.autocast(oracle.accelerator(), torch.bfloat16), torch.device(devices_of(K)[-1]):
        yield lambda: thread_state(setting)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.usefixtures("on_side_streams")
def test_an_error_of_a_replica_leaves_the_thread_its_state(way: str, on: str) -> None:
    net, x = Failing().to(devices_of(1)[0]), inputs(5)
    with much_of_its_own(on) as look:
        before = look()
        for _ in range(2):
            with pytest.raises(ValueError, match="the user's own"):
                WAYS[way](net, x)
            assert look() == before
            close_all()
    gc.collect()
    assert not threads_left()
