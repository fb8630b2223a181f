"""How long devices are at work: measured on their streams, not where their work is issued."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import ClassVar

import oracle
import pytest
import torch
from oracle import devices_of

from lightning_dp import sim
from lightning_dp.parallel.links import Span, Stretch
from lightning_dp.parallel.workers import Executor, Task


@pytest.fixture(autouse=True)
def on_sim(monkeypatch: pytest.MonkeyPatch) -> None:
    sim.enable(8)
    monkeypatch.setattr(oracle, "ON", "sim")


class SlowDevices:
    """Devices that work on what they are told long after it was issued: each has a clock.

    Stands for `torch.Event`. The marks of a device are made when it gets there.
    """

    clocks: ClassVar[Counter[torch.device]] = Counter()
    are_through = True

    def __init__(self, device: torch.device, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: torch.Stream) -> None:
        self.at = SlowDevices.clocks[stream.device]

    def query(self) -> bool:
        return SlowDevices.are_through

    def elapsed_time(self, other: SlowDevices) -> float:
        return (other.at - self.at) * 1e3

    @classmethod
    def work(cls, device: torch.device, seconds: float) -> None:
        """Tells a device to do something that takes so long."""
        cls.clocks[device] += seconds  # type: ignore[assignment]


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[SlowDevices]]:
    monkeypatch.setattr(torch, "Event", SlowDevices)
    monkeypatch.setattr(SlowDevices, "are_through", True)
    yield SlowDevices
    SlowDevices.clocks.clear()


def test_a_span_is_what_its_device_does_in_between(slow: type[SlowDevices]) -> None:
    one, two = devices_of(2)
    slow.work(one, 1.0)
    spans = [Span(one), Span(two)]
    slow.work(one, 2.0)
    slow.work(two, 3.0)
    for span in spans:
        span.end()
    slow.work(one, 4.0)
    assert [span.seconds for span in spans] == [2.0, 3.0]


def test_a_stretch_ends_with_the_last_device(slow: type[SlowDevices]) -> None:
    one, two = devices_of(2)
    stretch = Stretch([one, two, one])
    slow.work(one, 20.0)
    slow.work(two, 30.0)
    assert not stretch.is_over(), "its end has not been issued"
    stretch.end()
    assert stretch.is_over() and stretch.seconds == 30.0
    slow.are_through = False
    assert not stretch.is_over()


def test_a_stretch_of_the_cpu_is_the_hosts() -> None:
    stretch = Stretch([torch.device("cpu")])
    time.sleep(0.01)
    stretch.end()
    assert stretch.is_over() and 0.01 <= stretch.seconds < 1


def test_spans_of_simulated_devices() -> None:
    device = devices_of(1)[0]
    torch.sim.set_speed(device, seconds_per_op=2e-3)
    try:
        span = Span(device)
        torch.ones(1, device=device) + 1
        span.end()
        span.wait()
        assert span.is_over() and span.seconds >= 4e-3
    finally:
        torch.sim.set_speed(device)


def chosen(executor: Executor, work: Callable[[torch.device], None], pieces: int = 30) -> str:
    """Where an executor runs a kind of work in the end."""
    where: set[str] = set()

    def call(device: torch.device) -> None:
        in_main = threading.current_thread() is threading.main_thread()
        where.add("inorder" if in_main else "threads")
        work(device)

    for _ in range(pieces):
        where.clear()
        devices = devices_of(3)
        tasks = [Task(k, device, lambda d=device: call(d)) for k, device in enumerate(devices)]  # type: ignore[misc]
        executor.run("work", tasks)
    return where.pop()


@pytest.mark.parametrize("faster", ["threads", "inorder"])
def test_auto_takes_the_way_that_devices_are_through_with_sooner(
    faster: str, slow: type[SlowDevices]
) -> None:
    """Though it takes the host longer to issue their work so."""

    def work(device: torch.device) -> None:
        in_main = threading.current_thread() is threading.main_thread()
        is_faster = faster == ("inorder" if in_main else "threads")
        if is_faster:
            time.sleep(0.001)
        slow.work(device, 0.1 if is_faster else 0.3)

    executor = Executor(devices_of(3), "auto")
    assert chosen(executor, work) == faster
    executor.close()


def test_auto_does_not_wait_for_devices_that_are_not_through(slow: type[SlowDevices]) -> None:
    slow.are_through = False
    executor = Executor(devices_of(3), "auto")
    chosen(executor, lambda device: slow.work(device, 0.1))
    slow.are_through = True
    before = torch.sim.host_waits()
    chosen(executor, lambda device: slow.work(device, 0.1), pieces=1)
    assert torch.sim.host_waits() == before
    executor.close()


def test_auto_marks_no_streams_in_most_steps(
    slow: type[SlowDevices], monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = Executor(devices_of(3), "auto")
    chosen(executor, lambda device: slow.work(device, 0.1), pieces=20)
    monkeypatch.setattr(torch, "Event", None)
    chosen(executor, lambda device: slow.work(device, 0.1), pieces=30)
    executor.close()
