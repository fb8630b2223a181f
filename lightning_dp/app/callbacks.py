"""Callbacks of the programs."""

import logging
import os
import statistics
import time
from collections import deque
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar
from lightning.pytorch.trainer.states import TrainerFn

log = logging.getLogger(__name__)


class InterruptedCheckpoint(Callback):
    """Saves a checkpoint when Ctrl-C or an error ends training among the batches of an epoch.

    Not before its first step, so that errors that come before there is anything to save reach the
    user as they are; nor in a validation, of which a resumed training would only run the rest: then
    the last epoch's checkpoint remains. Lightning's OnExceptionCheckpoint saves in both, and makes
    ``fit`` look for a checkpoint to resume from, too.

    Args:
        dirpath: folder of the file.
        filename: its name.
    """

    def __init__(self, dirpath: str | os.PathLike[str], filename: str = "interrupted.ckpt") -> None:
        super().__init__()
        self.path = Path(dirpath) / filename

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Saves the checkpoint if the training has taken a step, and the epoch is not through."""
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking or trainer.validating:
            return
        # Saving is collective, and several processes are never stopped at the same point.
        alone = trainer.world_size == 1
        # Lightning sets the attribute from outside the class, where type checkers do not see it.
        dry = getattr(trainer, "fast_dev_run", False)
        batches = trainer.fit_loop.epoch_loop.batch_progress
        is_through = batches.is_last_batch and batches.current.completed == batches.current.ready
        if alone and trainer.global_step > 0 and not dry and not is_through:
            try:
                trainer.save_checkpoint(self.path, weights_only=False)
            except OSError as error:  # the error that ended the training is reported, not this
                log.warning("%s was not written: %s", self.path, error)


class StepTimes(Callback):
    """Measures how long training steps take, from the end of one to the end of the next.

    So loading counts, and what comes between two epochs does not. Of a long training the latest
    steps count.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seconds: deque[float] = deque(maxlen=1024)
        self._latest: float | None = None

    @property
    def milliseconds(self) -> float | None:
        """The median; None if no step has followed another."""
        return statistics.median(self._seconds) * 1e3 if self._seconds else None

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins anew."""
        self._latest = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        """Notes the time since the step before."""
        now = time.perf_counter()
        if self._latest is not None:
            self._seconds.append(now - self._latest)
        self._latest = now


def progress_bar(refresh_rate: int = 1) -> ProgressBar:
    """Makes rich's progress bar, or tqdm's where rich is not installed.

    Args:
        refresh_rate: batches from one redraw to the next.
    """
    kind = RichProgressBar if find_spec("rich") else TQDMProgressBar
    return kind(refresh_rate=refresh_rate)
