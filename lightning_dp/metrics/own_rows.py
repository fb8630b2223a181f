"""Own rows: loggers that a step calls itself get something of each replica, which is told."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

from lightning.pytorch import LightningModule

from lightning_dp.parallel.contexts import Lasting, context
from lightning_dp.state import Passes

LOOKS_AT_ROWS = 2
"""Steps of each kind that are looked at."""


class OwnRows:
    """Looks whether the first steps of each kind use `self.logger`.

    Attributes:
        looks_left: for the kinds of steps that have run.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self.looks_left: dict[str, int] = {}

    @context
    def around(self, hook: str, replicas: int) -> Iterator[None]:
        """Looks at a step that so many replicas run."""
        used: set[str] = set()
        with _Watched(self._module.trainer, used.add):
            yield
        if replicas > 1:
            self.looks_left[hook] = self.looks_left.get(hook, LOOKS_AT_ROWS) - 1
            if used:
                self._tell(hook, min(used), replicas)

    def _tell(self, hook: str, name: str, replicas: int) -> None:
        self.looks_left[hook] = 0
        end = f"on_{'train' if hook == 'training_step' else hook.removesuffix('_step')}_batch_end"
        warnings.warn(
            f"{hook}: expected what is logged to go through self.log, got self.logger.{name}. Each "
            f"of {replicas} replicas does it with its own samples: one device makes one row or "
            f"picture, and they make {replicas}. Return what it shows, and log it in {end}.",
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
