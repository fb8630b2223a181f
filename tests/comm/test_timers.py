"""How long devices are at work: measured on their streams, not where their work is issued."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from support.device_kinds import on_separate
from support.oracle import Classifier, devices_of, loader, trainer
from torch import Tensor, nn

from lightning_dp import DataParallelStrategy
from lightning_dp.parallel.apply import collectives
from lightning_dp.parallel.comm import DeviceTimer
from lightning_dp.parallel.devices import peak_memory
from lightning_dp.parallel.step import StepParallel

pytestmark = [on_separate, pytest.mark.usefixtures("on")]


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
        cls.clocks[device] += seconds


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[SlowDevices]]:
    monkeypatch.setattr(torch, "Event", SlowDevices)
    monkeypatch.setattr(SlowDevices, "are_through", True)
    yield SlowDevices
    SlowDevices.clocks.clear()


def test_a_timer_counts_what_its_devices_do_in_between(slow: type[SlowDevices]) -> None:
    one, two = devices_of(2)
    slow.work(one, 1.0)
    spans = [DeviceTimer([one]), DeviceTimer([two])]
    slow.work(one, 2.0)
    slow.work(two, 3.0)
    both = DeviceTimer([one, two, one, torch.device("cpu")])
    slow.work(one, 4.0)
    assert not spans[0].is_over(), "its end has not been issued"
    for span in [*spans, both]:
        span.end()
    slow.work(one, 4.0)
    assert [span.seconds for span in spans] == [6.0, 3.0]
    assert both.seconds == both.device_seconds == 4.0 and both.is_over()
    slow.are_through = False
    assert not both.is_over()


# --- the meter: what devices do for a step, without waiting for each other ------------------------


class Working(nn.Module):
    """Its forward and its backward take each device so long, once the device gets there."""

    def __init__(self, slow: type[SlowDevices], seconds: tuple[float, float, float]) -> None:
        super().__init__()
        self.net, self.slow, self.seconds = nn.Linear(4, 1), slow, seconds

    def training_step(self, x: Tensor) -> Tensor:
        y = self.net(x)
        seconds = self.seconds[y.device.index]
        self.slow.work(y.device, seconds)
        y.register_hook(lambda g: self.slow.work(g.device, 2 * seconds))
        return y.square().mean()


class Meeting(Working):
    """Its replicas wait for the slowest of them in the middle of a step."""

    def training_step(self, x: Tensor) -> Tensor:
        loss = super().training_step(x)
        collectives.exchange("waiting", None, lambda *_: wait_for_all(self.slow))
        return loss


def wait_for_all(slow: type[SlowDevices]) -> None:
    """What devices do that wait for each other: from here on their clocks are those of the last."""
    last = max(slow.clocks.values())
    for device in devices_of(3):
        slow.clocks[device] = last


@pytest.mark.parametrize("executor", ["threads", "inorder"])
@pytest.mark.parametrize("kind", [Working, Meeting])
def test_waiting_for_others_is_not_counted_as_work(
    kind: Any, executor: str, slow: type[SlowDevices]
) -> None:
    seconds, devices = (1.0, 3.0, 2.0), devices_of(3)
    net = kind(slow, seconds).to(devices[0])
    engine = StepParallel(
        net, devices, output_device=devices[0], split=lambda n: (2, 2, 2), executor=executor
    )
    engine.meter.is_watched = True
    for _ in range(2):
        loss = engine.train("training_step", torch.randn(6, 4))
        wait_for_all(slow)  # as copies of the losses do
        loss.backward()
    for step in engine.meter.take():
        assert step.busy_seconds == pytest.approx([3 * s for s in seconds])
        assert step.step_seconds == pytest.approx(9.0)
    engine.close()


def test_nobody_watches_and_the_peaks_of_memory_stay_the_programs_own() -> None:
    for device in devices_of(3):
        torch.empty(10_000_000, dtype=torch.uint8, device=device)
    peaks = [peak_memory(device) for device in devices_of(3)]
    strategy = DataParallelStrategy()
    trainer(3, strategy, max_epochs=1).fit(Classifier(), loader(), loader())
    assert [peak_memory(device) for device in devices_of(3)] == peaks
    assert [usage.peak_bytes for usage in strategy.usage] == peaks
