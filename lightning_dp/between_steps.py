"""Between steps: what the loop asks of a strategy there, and who may have written weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from typing_extensions import override

from lightning_dp.checkpointing import CheckpointMixin
from lightning_dp.gradient_hooks import sees_gradients
from lightning_dp.modes import Mode
from lightning_dp.parallel.contexts import Surroundings
from lightning_dp.parallel.generated import context


class BetweenStepsMixin(CheckpointMixin):
    """The hooks of a strategy that are no steps."""

    _mode: Mode | None = None
    _are_seen: bool | None = None  # gradients between micro-batches, once somebody has asked
    _asks_why = False  # Lightning, about a training step that has returned None

    # Callbacks may write weights in ways that leave no trace, and they do it at these times.

    @override
    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        super().load_model_state_dict(checkpoint, strict=strict)
        self._resync()

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self._resync()

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self._resync()

    @override
    def on_validation_end(self) -> None:
        super().on_validation_end()
        self._resync()

    @override
    def on_test_end(self) -> None:
        super().on_test_end()
        self._resync()

    @override
    def on_predict_end(self) -> None:
        super().on_predict_end()
        self._resync()

    def _resync(self) -> None:
        if self._mode is not None:
            with Surroundings():
                self._mode.engine.resync()

    def are_gradients_seen(self) -> bool:
        """Whether the user's code looks at gradients between micro-batches, in any process."""
        if self._are_seen is None:
            own = sees_gradients(cast(Any, self.lightning_module).trainer)
            self._are_seen = own if self._world is None else any(self._world.gather(own))
        return self._are_seen

    @context
    def as_only_process(self) -> Iterator[None]:
        """While it lasts, it asks no other process."""
        world, self._world = self._world, None
        try:
            yield
        finally:
            self._world = world

    # A training step may return None, and its batch is skipped. Lightning refuses that where it
    # finds more than one process: some would wait for gradients that others do not have. Here None
    # comes from all processes or from none. So there is one process when Lightning asks for this
    # reason: it is the first that asks after the step.

    @property
    @override
    def world_size(self) -> int:
        if self._asks_why:
            self._asks_why = False
            return 1
        return super().world_size


def check_callbacks(trainer: Any) -> None:
    """Refuses what cannot be in several processes."""
    for callback in trainer.callbacks:
        if any(kind.__name__ == "BatchSizeFinder" for kind in type(callback).__mro__):
            raise ValueError(
                f"Expected no {type(callback).__qualname__} in several processes, as each of them "
                "would look for a checkpoint that the first one alone has written. Look for the "
                "batch size with one process: it is that of all samples together."
            )
