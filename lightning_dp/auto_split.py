"""split="auto" in a Trainer: times the steps, and runs those of the root alone without the engine.

The engine takes 0.5 to 1 ms for a step on one device, and models for which one device is fastest
have steps of a few milliseconds. Where outputs are needed elsewhere the engine runs the step all
the same. With several processes nothing is timed, since their steps wait for each other: all
devices work.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from lightning.pytorch import Trainer
from typing_extensions import override

from lightning_dp.modes import ForwardMode, Mode, StepMode
from lightning_dp.parallel.comm import DeviceTimer
from lightning_dp.parallel.scatter import BatchSizeError
from lightning_dp.parallel.split import Auto

_STEPS = {  # of Lightning's stages
    "train": "training_step",
    "sanity_check": "validation_step",
    "validate": "validation_step",
    "test": "test_step",
    "predict": "predict_step",
}


class AutoMode(Mode):
    """Runs each step in another mode, or on the root alone where that takes less time.

    A step's time is from its batch to the next one of the stage, so the optimizer's step and what
    user code does in between are in it. `split` chooses how many devices work; for the steps
    `to_check`, whose first one is checked, all do.
    """

    def __init__(
        self, mode: Mode, split: Auto, trainer: Trainer, to_check: Collection[str]
    ) -> None:
        super().__init__(mode.module, mode.transfer)
        self.engine, self._mode, self._split = mode.engine, mode, split
        self._trainer, self._to_check = trainer, to_check
        root = self.engine.devices[0]
        stays = isinstance(mode, ForwardMode) and not mode.moves_batch and root.type != "cpu"
        self._can_be_alone = root == self.engine.output_device and not stays
        # Of the latest batch:
        self.is_alone = False  # its step is the root's, without the engine
        self._step, self._num_samples = "", 0
        self._timer: DeviceTimer | None = None  # if its time is wanted

    @override
    def batch(self, batch: Any, dataloader_idx: int) -> Any:
        """Ends the step before, and decides whether the root does the next one alone."""
        stage = self._trainer.state.stage
        step = "" if stage is None else _STEPS.get(stage.value, "")
        n = 0 if step in self._to_check else self._count(batch)
        if self._timer is not None and step == self._step and n:
            self._timer.end()
            self._timer.wait()  # a few steps of each round are timed
            self._split.end(self._timer.device_seconds)
        self._timer = self._begin(step, n)
        self._step, self._num_samples, self.dataloader_idx = step, n, dataloader_idx
        is_one = bool(n and step and self._split.num_devices == 1)
        was_alone, self.is_alone = self.is_alone, is_one and self._can_be_alone
        if self.is_alone != was_alone:
            self.engine.resync()  # weights may have been written in a way that no version counts
            if isinstance(self._mode, StepMode):
                self._mode.batch(None, 0)  # lets go of the latest shards
        if self.is_alone:
            return self.transfer(batch, self.engine.devices[0], dataloader_idx=dataloader_idx)
        return self._mode.batch(batch, dataloader_idx)

    def _begin(self, step: str, n: int) -> DeviceTimer | None:
        """Decides how many devices work from here on; returns a timer if the time is wanted."""
        is_even = torch.are_deterministic_algorithms_enabled()
        if not n or not step or is_even:
            self._split.use_all(evenly=is_even)
            return None
        kind = step if isinstance(self._mode, StepMode) else None
        is_settled = self.engine.executor.is_settled(kind)
        is_timed = self._split.begin(step, n, is_settled=is_settled)
        devices = [*self.engine.devices, self.engine.output_device]
        return DeviceTimer(devices) if is_timed else None

    def _count(self, batch: Any) -> int:
        """The samples of a batch; 0 where that is not known, and the step raises the error."""
        if isinstance(batch, Iterator):
            return 0
        try:
            return self.engine.count_samples(batch) or 0
        except BatchSizeError:
            return 0

    @override
    def step(self, method: str, batch: Any, args: tuple[Any, ...]) -> Any:
        """Runs the step in the other mode, or as it is."""
        if not self.is_alone:
            return self._mode.step(method, batch, args)
        n = self._num_samples
        self.engine.last_sizes = (n, *[0] * (len(self.engine.devices) - 1))
        step = getattr(self.module, method)
        if method != "training_step":
            return step(batch, *args)
        self.engine.meter.start(self.engine.last_sizes)
        with self._root_works(n, is_end=not self.module.automatic_optimization):
            return step(batch, *args)

    @override
    def during_backward(self) -> AbstractContextManager[Any]:
        if not self.is_alone:
            return self._mode.during_backward()
        return self._root_works(0, is_end=self.module.automatic_optimization)

    @override
    def recover_backward(self, *args: Any) -> None:
        self._mode.recover_backward(*args)

    @contextmanager
    def _root_works(self, samples: int, *, is_end: bool) -> Iterator[None]:
        """Counts a part of a training step as the root's work; `is_end`: the last part."""
        meter, began = self.engine.meter, time.perf_counter()
        with meter.working([0]):
            yield
        seconds, root = time.perf_counter() - began, self.engine.usage[0]
        root.samples += samples
        root.busy_seconds += seconds
        meter.add_seconds({0: seconds})
        if is_end:
            meter.stop()
