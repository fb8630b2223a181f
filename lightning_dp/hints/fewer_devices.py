"""Under an even split: one line, once, if fewer devices would certainly be faster."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer

from lightning_dp.modes import Mode
from lightning_dp.parallel.split import FewerDevices

_FIRST = 48
"""First training steps of a fit that are looked at. Later only the last ones of epochs are, which
may be smaller."""

_LAST = 16
"""How many of these."""

log = logging.getLogger("lightning_dp")


class FewerDevicesHint:
    """Looks at the training steps of a fit on the CPU, and changes nothing about them.

    Accelerators compute asynchronously; what their devices do in a step is not known unless it is
    measured, which has a price.
    """

    is_alone = False
    is_watched = False  # it is nothing to this

    def __init__(self, mode: Mode, trainer: Trainer) -> None:
        self._mode, self._trainer = mode, trainer
        self._seen = FewerDevices()
        self.is_done = False  # there is nothing more to look at
        self._looks = 0
        self._began = self._busy = 0.0
        self._looking = False

    def step(
        self, method: str, batch: Any, alone: Callable[[], Any], several: Callable[[], Any]
    ) -> Any:
        """Runs a step of all devices."""
        is_late = self._looks >= _FIRST and not self._trainer.is_last_batch
        self._looking = False
        if method != "training_step" or is_late:
            return several()
        self._busy, self._began = self._work(), time.perf_counter()
        output = several()
        self._looking = True
        if not self._trainer.lightning_module.automatic_optimization:
            self._end()
        return output

    def backward(self, call: Callable[[], Any]) -> Any:
        """Runs a backward, which ends a step unless the step itself has called it."""
        loss = call()
        if self._looking:
            self._end()
        return loss

    def _end(self) -> None:
        self._looking = False
        engine = self._mode.engine
        if engine.reducer.accumulating:
            return
        seconds = time.perf_counter() - self._began
        self._looks += 1
        in_order = not engine.executor.is_in_threads("training_step")
        busy = self._work() - self._busy if in_order else None
        if engine.executor.is_settled("training_step"):
            self._seen.add(engine.last_sizes, busy, seconds)
        is_time = self._looks % 16 == 0 or self._looks > _FIRST
        verdict = self._seen.verdict() if is_time else None
        # Where an epoch is longer than the look, its last batch is waited for in vain.
        is_long = self._looks >= _FIRST and self._trainer.current_epoch == 0
        self.is_done = is_long or self._looks >= _FIRST + _LAST or verdict is not None
        if verdict is not None:
            log.warning(
                "%d devices take %.1f ms per step, one device at most about %.1f ms: "
                'DataParallelStrategy(split="auto") uses as many as are fastest.',
                len(engine.devices),
                verdict.together * 1e3,
                verdict.alone * 1e3,
            )

    def _work(self) -> float:
        return sum([usage.busy_seconds for usage in self._mode.engine.meter.usage])
