"""Stopping: a SIGTERM to any process ends them all, at the same batch.

So does an optimizer whose options are others than in the first process: with an error.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_dp.lightning_private import replace_sigterm, restore_sigterm, set_sigterm_received
from lightning_dp.processes.optimizers import fingerprint, refuse_others

if TYPE_CHECKING:
    from lightning_dp.parallel.processes import World

log = logging.getLogger("lightning_dp")


class Stopping:
    """Ends all processes before a batch of a fit, once they know that one has been told to end.

    They hear of it with what a step tells them anyway: one that is in the midst of a step when the
    signal comes may do another one.

    Lightning's own way lets a signal's handler call a collective, wherever the process is just then
    in its order of collectives, and hears the first process only.

    Args:
        trainer: whose processes end.
        world: the processes.

    Attributes:
        trainer: the Trainer.
        is_joint: whether all processes are ending, at the same place.
    """

    def __init__(self, trainer: Any, world: World) -> None:
        self.is_joint = False
        self.trainer, self._world, self._is_asked = trainer, world, False
        world.forget_asking()  # that was in an earlier fit
        replace_sigterm(trainer, self._on_sigterm, self._stop_together)

    def end(self) -> None:
        """Leaves the Trainer as it was."""
        restore_sigterm(self.trainer)

    def _on_sigterm(self, signum: int, frame: object) -> None:
        launcher = self.trainer.strategy.launcher
        if launcher is not None and not self._is_asked:
            launcher.kill(signum)
        self._is_asked = True
        self._world.ask()

    def _stop_together(self) -> None:
        optimizers = self.trainer.optimizers
        asking, differ = self._world.take_asking(fingerprint(optimizers))
        if differ:
            refuse_others(optimizers, self._world)
        if not asking:
            return
        if self._world.rank == 0:
            ranks = ", ".join(map(str, asking))
            log.warning("Process %s received SIGTERM: all processes end before this batch.", ranks)
        self.is_joint = True
        set_sigterm_received(self.trainer)
        raise SIGTERMException
