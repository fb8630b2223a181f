"""Failures: an error in one process ends all of them, and every one names it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

from lightning_dp.parallel.errors import add_note
from lightning_dp.processes.ranks import ProcessesMixin

if TYPE_CHECKING:
    from lightning_dp.processes.stopping import Stopping
    from lightning_dp.processes.watch import Watch

_SECONDS_TO_CLOSE = 5.0


class FailuresMixin(ProcessesMixin):
    """Ends all processes when one of them fails; stops them together."""

    _watch: Watch | None = None
    _stopping: Stopping | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy is watched once it is set up itself."""
        return {**super().__getstate__(), "_watch": None, "_stopping": None}

    @property
    def is_failing(self) -> bool:
        """Whether an error ends this process, so that the others may not come to a collective."""
        module: LightningModule | None = self.lightning_module
        if module is None or self._world is None:
            return False
        is_joint = self._stopping is not None and self._stopping.is_joint
        return bool(module.trainer.interrupted) and not is_joint

    # Setting up and tearing down

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        if self._world is None:
            return
        from lightning_dp.processes.watch import Watch

        if self._watch is None and self._store is not None:  # else the user has made the group
            self._watch = Watch(self._store, self._world.rank, self._world.size, self._doing)
        if self._watch is not None:
            self._watch.start()

    @override
    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if self._world is not None:
            from lightning_dp.processes.stopping import Stopping

            self._stopping = Stopping(trainer, self._world)

    @override
    def teardown(self) -> None:
        super().teardown()
        if self._stopping is not None:
            self._stopping.end()
        if self._watch is not None:
            self._watch.stop()

    def _doing(self) -> str:
        trainer = None if self._stopping is None else self._stopping.trainer
        if trainer is None or trainer.state.stage is None:
            return "setting up or ending"
        if not trainer.training:
            return str(trainer.state.stage.value)
        batch = trainer.fit_loop.epoch_loop.batch_idx
        return f"training, epoch {trainer.current_epoch}, batch {batch}"

    # Failing

    @override
    def barrier(self, name: str | None = None) -> None:
        if not self.is_failing:  # nobody else may come
            super().barrier(name)

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        watch = self._watch
        if self._world is None or watch is None or not self.is_failing:
            return
        from lightning_dp.processes.attempts import survives_processes
        from lightning_dp.processes.watch import is_of_group

        first = watch.first() if is_of_group(exception) else None
        if first is None:
            watch.note(exception)
        else:
            add_note(exception, f"The first to fail was {first}")
        self._leave()
        if first is None and self.global_rank == 0 and not survives_processes():
            watch.wait_for_readers()

    def _leave(self) -> None:
        """Closes this process's connections: who waits for it learns at once that it is gone.

        What it has sent to others that never come to receive it would be waited for, though not by
        the main thread.
        """
        self._world = None
        if dist.is_initialized():
            closing = threading.Thread(target=dist.destroy_process_group, daemon=True)
            closing.start()
            closing.join(_SECONDS_TO_CLOSE)
