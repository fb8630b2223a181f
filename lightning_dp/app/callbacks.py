"""Callbacks of the programs."""

import os
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn


class InterruptedCheckpoint(Callback):
    """Saves a checkpoint when Ctrl-C or an error ends training after its first step.

    Keeps out of the way of errors that come before there is anything to save, so that these reach
    the user as they are. Lightning's OnExceptionCheckpoint does not, and makes ``fit`` look for a
    checkpoint to resume from, too.

    Where a strategy has started several processes there is only the last epoch's checkpoint.

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
        """Saves the checkpoint if the training has taken a step."""
        training = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        # Saving is collective, and several processes are never stopped at the same point.
        alone = trainer.world_size == 1
        if training and alone and trainer.global_step > 0 and not _is_dry(trainer):
            trainer.save_checkpoint(self.path, weights_only=False)


def _is_dry(trainer: Trainer) -> bool:
    # Lightning sets the attribute from outside the class, where type checkers do not see it.
    return bool(getattr(trainer, "fast_dev_run", False))
