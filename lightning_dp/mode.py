"""A mode decides what a strategy with several devices does with the loop's batches and steps.

There are two: step mode (`step_mode`) and forward mode (`forward_mode`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from lightning_dp.parallel.engine import Engine

Transfer: TypeAlias = Callable[..., Any]
"""Lightning's transfer hooks: called with what is moved, where to, and `dataloader_idx`."""

_LIGHTNING = ("lightning.", "pytorch_lightning.")


class Mode(ABC):
    """Runs the steps of one LightningModule on an engine that it makes."""

    engine: Engine
    dataloader_idx = 0  # of the latest batch

    def __init__(self, module: LightningModule, transfer: Transfer) -> None:
        self.module = module
        self._transfer = transfer

    @abstractmethod
    def batch(self, batch: Any, dataloader_idx: int) -> Any:
        """Returns what the loop passes to hooks and to the step for a batch of the DataLoader."""

    @abstractmethod
    def step(self, method: str, batch: Any, args: tuple[Any, ...]) -> Any:
        """Runs a step for the whole batch, and returns what one device would have returned."""

    def close(self) -> None:
        """Ends the engine's threads."""
        self.engine.close()

    def during_backward(self) -> AbstractContextManager[Any]:
        """Surrounds Lightning's backward of a step's loss."""
        return self.engine.profiler_range("lightning_dp.backward")

    def recover_backward(
        self, error: torch.OutOfMemoryError, context: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """Runs the step and its backward again after the backward ran out of memory, or raises.

        Args:
            error: what the backward raised.
            context: the precision plugin's context of a training step.
        """
        raise error

    def loss_of_closure(self, result: Any) -> Any:
        """With several processes: the loss of all, where an optimizer's closure returned ours."""
        return result

    def to_be_scaled(self, loss: Tensor) -> Tensor:
        """Moves a loss to the root before a gradient scaler sees it.

        The scaler's scale lies where its first loss does. A scale on the host would read from the
        devices whether gradients are finite without waiting for them.
        """
        root = self.engine.devices[0]
        return loss.to(root, non_blocking=True) if loss.device.type == "cpu" else loss


def needs_forward_mode(module: LightningModule, steps: Sequence[str]) -> str:
    """Returns why a run of these steps needs forward mode, or "".

    Optimizers act once for the whole batch, and an iterator over batches is advanced once, so such
    steps run once, on the main thread. With manual optimisation so do all of the module's steps:
    its validation loss is then computed the same way in every run.
    """
    if not module.automatic_optimization:
        return "it sets automatic_optimization = False"
    own = {name: getattr(module, name) for name in steps}
    taking = [name for name, step in own.items() if step is not None and takes_iterator(step)]
    return f"its {taking[0]} takes dataloader_iter" if taking else ""


def takes_iterator(step: Callable[..., Any]) -> bool:
    """Whether Lightning's loop gives a step an iterator over batches in the place of a batch."""
    return is_param_in_hook_signature(step, "dataloader_iter", explicit=True)


def own_hooks(module: LightningModule) -> set[str]:
    """Names of the per-shard transfer hooks that the module or its data module overrides."""
    owners: list[Any] = [module, module.trainer.datamodule]  # type: ignore[attr-defined]  # typed too narrowly
    return {hook for owner in owners if owner is not None for hook in _overridden(owner)}


def _overridden(owner: Any) -> Iterator[str]:
    for hook in ("transfer_batch_to_device", "on_after_batch_transfer"):
        cls = next(cls for cls in type(owner).__mro__ if hook in vars(cls))
        if hook in vars(owner) or not cls.__module__.startswith(_LIGHTNING):
            yield hook
