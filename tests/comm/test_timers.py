"""How long devices are at work: measured on their streams, not where their work is issued."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from support.device_kinds import on_separate
from support.oracle import devices_of
from torch import Tensor, nn

from lightning_dp.parallel.apply import collectives
from lightning_dp.parallel.step import StepParallel

pytestmark = [on_separate, pytest.mark.usefixtures("on")]


class SlowDevices:
    """Devices that work on what they are told long after it was issued: each has a clock.

    Stands for `torch.Event`. The marks of a device are made when it gets there.
    """

    clocks: ClassVar[Counter[torch.device]] = Counter()

    def __init__(self, device: torch.device, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: torch.Stream) -> None:
        self.at = SlowDevices.clocks[stream.device]

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: SlowDevices) -> float:
        return (other.at - self.at) * 1e3

    @classmethod
    def work(cls, device: torch.device, seconds: float) -> None:
        """Tells a device to do something that takes so long."""
        cls.clocks[device] += seconds

    @classmethod
    def meet(cls) -> None:
        """Devices wait for each other: from here on their clocks are those of the last."""
        last = max(cls.clocks.values())
        for device in devices_of(3):
            cls.clocks[device] = last


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[SlowDevices]]:
    monkeypatch.setattr(torch, "Event", SlowDevices)
    yield SlowDevices
    SlowDevices.clocks.clear()


class Working(nn.Module):
    """Its forward and its backward take each device so long; in the middle replicas may meet."""

    def __init__(self, slow: type[SlowDevices], meets: bool) -> None:
        super().__init__()
        self.net, self.slow, self.meets = nn.Linear(4, 1), slow, meets

    def training_step(self, x: Tensor) -> Tensor:
        y = self.net(x)
        seconds = SECONDS[y.device.index]
        self.slow.work(y.device, seconds)
        y.register_hook(lambda g: self.slow.work(g.device, 2 * seconds))
        if self.meets:
            collectives.exchange("waiting", None, lambda *_: self.slow.meet())
        return y.square().mean()


SECONDS = (1.0, 3.0, 2.0)


@pytest.mark.parametrize("executor", ["threads", "inorder"])
@pytest.mark.parametrize("meets", [False, True])
def test_waiting_for_others_is_not_counted_as_work(
    meets: bool, executor: Any, slow: type[SlowDevices]
) -> None:
    devices, options = devices_of(3), {"split": lambda n: (2, 2, 2), "executor": executor}
    net = Working(slow, meets).to(devices[0])
    engine = StepParallel(net, devices, output_device=devices[0], **options)
    engine.meter.is_watched = True
    for _ in range(2):
        loss = engine.train("training_step", torch.randn(6, 4))
        slow.meet()  # as copies of the losses do
        loss.backward()
    for step in engine.meter.take():
        assert step.busy_seconds == pytest.approx([3 * s for s in SECONDS])
        assert step.step_seconds == pytest.approx(9.0)
    engine.close()
