"""The meter: what each device does in a training step, by the best means that it has."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from lightning_dp.parallel.contexts import Paired
from lightning_dp.parallel.devices import replica_names
from lightning_dp.parallel.split import Sizes, StepUsage
from lightning_dp.parallel.step_meter import PeakMemory, StepMeter


@dataclass
class DeviceUsage:
    """What one device has done in training so far.

    Attributes:
        device: the device.
        name: the replica's name, which is the device's unless several share it.
        samples: training samples it was given; in forward mode the rows of all spread calls.
        busy_seconds: time spent in its forward and backward, as its worker saw it; in forward
            mode in its forward. Accelerators compute asynchronously: there it is the time that
            issuing the forward took.
        peak_bytes: the most memory that was in use on the device since its statistics were reset
            last, by whomever; 0 where devices do not count it, as the CPU.
    """

    device: torch.device
    name: str
    samples: int = 0
    busy_seconds: float = 0.0
    peak_bytes: int = 0


class Meter:
    """What the devices have done since the engine was made, and if asked for, in every step."""

    def __init__(self, devices: Sequence[torch.device], process: int | None = None) -> None:
        self.names = replica_names(devices, process)
        self.usage = list(map(DeviceUsage, devices, self.names))  # since the engine was made
        self._devices = list(devices)
        self._memory = PeakMemory(devices)
        self.steps: StepMeter | None = None  # measures training steps, once somebody watches
        self.counted: Sizes = ()  # of the latest step, as long as it may run again
        self.kind = ""  # of work, as the executor knows the latest training step

    def watch(self) -> None:
        """Measures every training step from now on."""
        self.steps = self.steps or StepMeter(self._devices, self._memory)

    @property
    def latest(self) -> StepUsage | None:
        """The latest training step that the devices are through with; None if none is watched."""
        return None if self.steps is None else self.steps.latest()

    def take(self, *, wait: bool = False) -> list[StepUsage]:
        """The steps measured since the last call; see `StepMeter.take`."""
        return [] if self.steps is None else self.steps.take(wait=wait)

    def uncount(self) -> None:
        """The step whose forward was done last will run again."""
        for usage, size in zip(self.usage, self.counted, strict=False):
            usage.samples -= size
        self.counted = ()

    def is_by_counts(self) -> bool:
        """Whether a step is measured by what devices count themselves, whatever it is for."""
        return self.steps is not None and self.steps.is_by_counts()

    def working(self, replicas: Sequence[int]) -> AbstractContextManager[None]:
        """While it lasts, the devices of some replicas are at work for the step."""
        return nullcontext() if self.steps is None else self.steps.working(replicas)

    def add_alone(self, samples: int, seconds: float) -> None:
        """The root has done a training step without the others, in so many seconds."""
        self.usage[0].samples += samples
        self.usage[0].busy_seconds += seconds
        if self.steps is not None:
            self.steps.add(0, seconds)

    def unmeasured(self) -> AbstractContextManager[None]:
        """What happens meanwhile does not count into the devices' peaks of memory."""
        return Paired(self._memory.restart, self._memory.forget)

    def read_peaks(self) -> None:
        """Brings the totals' peaks of memory up to date."""
        for usage, peak in zip(self.usage, self._memory.overall(), strict=True):
            usage.peak_bytes = peak
