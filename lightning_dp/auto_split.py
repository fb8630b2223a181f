"""split="auto" in a Trainer: times the steps, and runs those of the root alone without the engine.

The engine takes 0.5 to 1 ms for a step on one device, and models for which one device is fastest
have steps of a few milliseconds. Where outputs are needed elsewhere the engine runs the step all
the same. With several processes nothing is timed, since their steps wait for each other: all
devices work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch import Trainer

from lightning_dp.forward_mode import ForwardMode
from lightning_dp.mode import Mode
from lightning_dp.parallel.comm import DeviceTimer
from lightning_dp.parallel.scatter import BatchSizeError
from lightning_dp.parallel.split import Auto
from lightning_dp.step_mode import StepMode

_STEPS = {  # of Lightning's stages
    "train": "training_step",
    "sanity_check": "validation_step",
    "validate": "validation_step",
    "test": "test_step",
    "predict": "predict_step",
}


class AutoSplitSteps:
    """The steps of a Trainer whose strategy has split="auto".

    A step's time is from its batch to the next one of the stage, so the optimizer's step and what
    user code does in between are in it. Micro-batches of one optimizer's step are one step here.

    Attributes:
        is_alone: whether the step of the latest batch runs on the root, without the engine.
        accumulates: whether the optimizer waits after that step for a later one.
    """

    def __init__(self, mode: Mode, split: Auto, trainer: Trainer) -> None:
        self.is_alone = self.accumulates = False
        self._mode, self._split, self._trainer, self._engine = mode, split, trainer, mode.engine
        root, output_device = mode.engine.devices[0], mode.engine.output_device
        stays = isinstance(mode, ForwardMode) and not mode.moves_batch and root.type != "cpu"
        self._can_be_alone = root == output_device and not stays
        self._step = ""  # of the latest batch
        self._num_samples = self._num_batches = 0
        self._timer: DeviceTimer | None = None  # of a step whose time is wanted

    @property
    def next_step(self) -> str:
        """The name of the step that the batches of this stage are for."""
        stage = self._trainer.state.stage
        return "" if stage is None else _STEPS.get(stage.value, "")

    def begin(self, batch: Any, *, is_free: bool) -> bool:
        """Ends the step before, and decides about the next: whether the root does it alone.

        Unless the choice `is_free`, all devices work.
        """
        n, step = self._count(batch) if is_free else 0, self.next_step
        continues = self.accumulates and step == self._step and n
        if continues:
            self._num_batches += 1
        elif self._timer is not None and step == self._step and n:
            self._timer.end()
            self._timer.wait()  # a few steps of each round are timed
            self._split.end(self._timer.device_seconds / self._num_batches)
        if not continues:
            self._begin(step, n)
        self._step, self._num_samples = step, n
        was_alone, self.is_alone = (
            self.is_alone,
            bool(n and step and self._split.num_devices == 1 and self._can_be_alone),
        )
        if self.is_alone != was_alone:
            self._engine.resync()  # weights may have been written in a way that no version counts
            if isinstance(self._mode, StepMode):
                self._mode.batch(None, 0)  # lets go of the latest shards
        return self.is_alone

    def _begin(self, step: str, n: int) -> None:
        self._num_batches, self._timer = 1, None
        is_even = torch.are_deterministic_algorithms_enabled()
        if not n or not step or is_even:
            self._split.use_all(evenly=is_even)
            return
        kind = step if isinstance(self._mode, StepMode) else None
        if self._split.begin(step, n, is_settled=self._engine.executor.is_settled(kind)):
            self._timer = DeviceTimer([*self._engine.devices, self._engine.output_device])

    def step(self, method: str, own: Callable[[], Any]) -> Any:
        """Runs Lightning's own step on the root."""
        engine, n = self._engine, self._num_samples
        engine.last_sizes = (n, *[0] * (len(engine.devices) - 1))
        if method != "training_step":
            return own()
        engine.meter.start(engine.last_sizes)
        is_manual = not self._trainer.lightning_module.automatic_optimization
        return self._on_root(own, n, is_end=is_manual)

    def backward(self, own: Callable[[], Any]) -> Any:
        """Runs Lightning's backward of a step that ran on the root alone."""
        return self._on_root(own, 0, is_end=self._trainer.lightning_module.automatic_optimization)

    def _on_root(self, work: Callable[[], Any], samples: int, *, is_end: bool) -> Any:
        """Does a part of a training step of the root alone, and counts it as the root's work."""
        meter, began = self._engine.meter, time.perf_counter()
        with meter.working([0]):
            result = work()
        seconds, root = time.perf_counter() - began, self._engine.usage[0]
        root.samples += samples
        root.busy_seconds += seconds
        meter.add_seconds({0: seconds})
        if is_end:
            meter.stop()
        return result

    def _count(self, batch: Any) -> int:
        """The samples of a batch; 0 where that is not known, and the step raises the error."""
        if isinstance(batch, Iterator):
            return 0
        try:
            return self._engine.count_samples(batch) or 0
        except BatchSizeError:
            return 0
