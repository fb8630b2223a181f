"""split="auto" in a Trainer: times the steps, and runs those of the root alone without the engine.

The engine takes 0.5 to 1 ms for a step on one device, and models for which one device is fastest
have steps of a few milliseconds. Where outputs are needed elsewhere the engine runs the step all
the same. With several processes nothing is timed, since their steps wait for each other: all
devices work.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch import Trainer

from lightning_dp.forward_mode import ForwardMode
from lightning_dp.mode import Mode
from lightning_dp.parallel.comm import DeviceTimer
from lightning_dp.parallel.scatter import BatchSizeError
from lightning_dp.parallel.split import Auto, Timing
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
        is_alone: whether the latest step ran on the root without the engine.
    """

    def __init__(self, mode: Mode, split: Auto, trainer: Trainer) -> None:
        self.is_alone = False
        self._mode, self._split, self._trainer = mode, split, trainer
        engine = self._engine = mode.engine
        root = engine.devices[0]
        stays = isinstance(mode, ForwardMode) and not mode.moves_batch and root.type != "cpu"
        self._can_be_alone = root == engine.output_device and not stays
        self._devices = [*engine.devices, engine.output_device]
        self._stage = ""
        self._accumulates = False  # the latest step was not the last one before the optimizer's
        self._root_batch: Any = None  # the latest batch, if the root has it
        self._timing: Timing | None = None  # of the step that runs
        self._timer: DeviceTimer | None = None
        self._num_batches = 0
        # Timed steps that devices are still at; older ones are dropped.
        self._unread: deque[tuple[Timing, DeviceTimer, int]] = deque(maxlen=16)

    @property
    def next_step(self) -> str | None:
        """The name of the step that the batches of this stage are for."""
        stage = self._trainer.state.stage
        return None if stage is None else _STEPS.get(stage.value)

    def begin(self, batch: Any) -> bool:
        """Ends the step before, and decides about the next: whether the root does it alone."""
        self._root_batch = None
        n, stage = self._num_samples(batch), self.next_step or ""
        while self._unread and self._unread[0][1].is_over():
            timing, timer, num_batches = self._unread.popleft()
            self._split.end(timing, timer.device_seconds / num_batches)
        if stage != self._stage or not n:
            self._timer = None  # what comes between stages is no step's time
        elif self._accumulates:
            self._num_batches += 1
            return self._split.num_devices == 1 and self._can_be_alone
        if self._timer is not None and self._timing is not None:
            self._timer.end()
            self._unread.append((self._timing, self._timer, self._num_batches))
        self._stage, self._num_batches, self._timer = stage, 1, None
        is_even = torch.are_deterministic_algorithms_enabled()
        if not n or not stage or is_even:
            self._split.use_all(evenly=is_even)
            return False
        kind = stage if isinstance(self._mode, StepMode) else None
        is_settled = self._engine.executor.is_settled(kind)
        self._timing = self._split.begin(stage, n, is_settled=is_settled)
        if self._timing is not None:
            self._timer = DeviceTimer(self._devices)
        return self._split.num_devices == 1 and self._can_be_alone

    def take(self, batch: Any) -> Any:
        """Notes and returns a batch that the root has got, and will work on alone."""
        self._root_batch = batch
        return batch

    def is_for_root(self, method: str, batch: Any) -> bool:
        """Whether the root does this step alone; called once for every step."""
        was_alone, self.is_alone = self.is_alone, batch is not None and batch is self._root_batch
        if self.is_alone != was_alone:
            self._engine.resync()  # weights may have been written in a way that no version counts
            if isinstance(self._mode, StepMode):
                self._mode.batch(None, 0)  # lets go of the latest shards
        self._accumulates = method == "training_step" and self._engine.accumulating
        return self.is_alone

    def step(self, method: str, batch: Any, own: Callable[[], Any]) -> Any:
        """Runs Lightning's own step on the root."""
        engine, samples = self._engine, self._num_samples(batch)
        engine.last_sizes = (samples, *[0] * (len(engine.devices) - 1))
        if method != "training_step":
            return own()
        engine.meter.start(engine.last_sizes)
        is_manual = not self._trainer.lightning_module.automatic_optimization
        return self._on_root(own, samples, is_end=is_manual)

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

    def _num_samples(self, batch: Any) -> int:
        """0 if it is not known before the step, which then raises the error where there is one."""
        if isinstance(batch, Iterator):
            return 0
        try:
            return self._engine.count_samples(batch) or 0
        except BatchSizeError:
            return 0
