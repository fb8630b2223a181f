"""Own rows: loggers that a step calls itself get something of each replica, which is told."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

from lightning.pytorch import LightningModule

from lightning_dp.parallel.contexts import Lasting
from lightning_dp.parallel.generated import context
from lightning_dp.state import Passes

_LOOKS = 2
"""Steps of each kind that are looked at."""

_INSTEAD = {
    "training_step": "on_train_batch_end",
    "validation_step": "on_validation_batch_end",
    "test_step": "on_test_batch_end",
    "predict_step": "on_predict_batch_end",
}
"""The hook for what is seen of the whole batch, for each kind of step."""


class OwnRows:
    """Looks whether the first steps of each kind use `self.logger`.

    Attributes:
        looks_left: for each kind of step.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self.looks_left = dict.fromkeys(_INSTEAD, _LOOKS)

    @context
    def around(self, hook: str, replicas: int) -> Iterator[None]:
        """Looks at a step that so many replicas run, of which there are several."""
        used: set[str] = set()
        with _Watched(self._module.trainer, used.add):
            yield
        self.looks_left[hook] = 0 if used else self.looks_left[hook] - 1
        for name in sorted(used)[:1]:
            self._tell(hook, name, replicas)

    def _tell(self, hook: str, name: str, replicas: int) -> None:
        warnings.warn(
            f"{hook}: expected what is logged to go through self.log, got self.logger.{name}. Each "
            f"of {replicas} replicas does it with its own samples: one device makes one row or "
            f"picture, and they make {replicas}. Return what it shows, and log it in "
            f"{_INSTEAD[hook]}.",
            stacklevel=2,
        )


class _Watched(Lasting):
    """While it lasts, what is done with a Trainer's loggers is noted."""

    def __init__(self, trainer: Any, note: Callable[[str], object]) -> None:
        self._trainer, self._note, self._own = trainer, note, trainer.loggers

    def begin(self) -> None:
        """Others pass for the loggers."""
        self._trainer.loggers = [_Noted(logger, self._note) for logger in self._own]

    def end(self) -> None:
        """They are the Trainer's own again."""
        self._trainer.loggers = self._own


class _Noted(Passes):
    """A logger that notes what is done with it."""

    def __init__(self, logger: Any, note: Callable[[str], object]) -> None:
        super().__init__(logger)
        self._note = note

    def __getattr__(self, name: str) -> Any:
        """All is the logger's."""
        if name == "experiment" or name.startswith("log_"):
            self._note(name)
        return super().__getattr__(name)
