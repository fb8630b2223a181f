"""The primitives and the drop-in's stages, in loops of one's own: an interrupt or an error in them
leaves the calling thread its state."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import oracle
import pytest
import torch
from fault_cases import Setting, _put_back, thread_state, threads_left
from interrupts import Tracer
from oracle import devices_of
from spreading import inputs, perceptron
from torch import Tensor, nn

from lightning_dp import DataParallel, gather, parallel_apply, replicate, scatter

pytestmark = pytest.mark.usefixtures("on", "one_thread")
K = 2
EVERY = 11
"""Of so many lines one is interrupted."""
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


def detached(net: nn.Module, x: Tensor) -> None:
    replicate(net, devices_of(K), detach=True)


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
    "detached": detached,
    "own stages": own_stages,
    "stage by stage": stage_by_stage,
}


@contextlib.contextmanager
def much_of_its_own(on: str) -> Iterator[Callable[[], dict[str, Any]]]:
    """In here a thread has state of its own; gives what looks at it."""
    setting = Setting("drop-in", on=on)
    with torch.autocast(oracle.accelerator(), torch.bfloat16), torch.device(devices_of(K)[-1]):
        yield lambda: thread_state(setting)


def lines(way: str) -> Tracer:
    """The lines of ours that it comes to."""
    tracer, net, x = Tracer(), perceptron().double().to(devices_of(1)[0]), inputs(5)
    tracer.run(lambda: WAYS[way](net, x))
    close_all()
    assert len(tracer.visits) > 50
    return tracer


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.usefixtures("on_side_streams")
def test_an_interrupt_at_any_line_leaves_the_thread_its_state(way: str, on: str) -> None:
    net, x = perceptron().double().to(devices_of(1)[0]), inputs(5)
    broken = []
    visits = lines(way).visits
    found = [(line, 1) for line in visits]
    # All lines that are about a thread's state, and some of the others.
    rooms = ("/streams.py", "/devices.py", "/thread_state.py")
    own = [(line, n) for line, n in visits.items() if line[0].endswith(rooms)]
    for line, nth in sorted({*found[::EVERY], *own}):
        twin = copy.deepcopy(net)
        with much_of_its_own(on) as look:
            before = look()
            with contextlib.suppress(KeyboardInterrupt):
                Tracer(line, nth).run(lambda twin=twin: WAYS[way](twin, x))
            after = look()
            if after != before:
                broken.append((line, {k: v for k, v in after.items() if v != before[k]}))
                _put_back(before)
        close_all()
    assert not broken, "\n".join(map(str, broken))
    assert not threads_left()


@pytest.mark.parametrize("way", ["loop", "own stages", "stage by stage"])
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
