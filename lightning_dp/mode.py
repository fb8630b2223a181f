"""A mode decides what a strategy with several devices does with the loop's batches and steps.

There are two: step mode (`step_mode`) and forward mode (`forward_mode`). `auto_split` puts either
of them aside for steps that are fastest on the root alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from lightning_dp.parallel.engine import Engine

Transfer: TypeAlias = Callable[..., Any]
"""Lightning's transfer hooks: called with a batch or shard, a device and `dataloader_idx`."""


class Mode(ABC):
    """Runs the steps of one LightningModule on an engine that it makes."""

    engine: Engine
    dataloader_idx = 0  # of the latest batch

    def __init__(self, module: LightningModule, transfer: Transfer) -> None:
        self.module, self.transfer = module, transfer

    @abstractmethod
    def batch(self, batch: Any, dataloader_idx: int) -> Any:
        """Returns what the loop passes to hooks and to the step for a batch of the DataLoader."""

    @abstractmethod
    def step(self, method: str, batch: Any, args: tuple[Any, ...]) -> Any:
        """Runs a step for the whole batch, and returns what one device would have returned."""

    @abstractmethod
    def during_backward(self) -> AbstractContextManager[Any]:
        """Surrounds Lightning's backward of a step's loss."""

    def close(self) -> None:
        """Ends the engine's threads."""
        self.engine.close()

    def recover_backward(
        self, error: torch.OutOfMemoryError, context: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """Runs the step, in its context, and its backward again after that ran out of memory."""
        raise error

    def to_be_scaled(self, loss: Tensor) -> Tensor:
        """Moves a loss to the root before a gradient scaler sees it.

        The scaler's scale lies where its first loss does. A scale on the host would read from the
        devices whether gradients are finite without waiting for them.
        """
        root = self.engine.devices[0]
        return loss.to(root, non_blocking=True) if loss.device.type == "cpu" else loss


_STEPS: dict[Any, tuple[str, ...]] = {
    TrainerFn.FITTING: ("training_step", "validation_step"),
    TrainerFn.VALIDATING: ("validation_step",),
    TrainerFn.TESTING: ("test_step",),
    TrainerFn.PREDICTING: ("predict_step",),
}


def why_forward_mode(module: LightningModule) -> str:
    """Returns why the Trainer's run needs forward mode, or "".

    Optimizers act once for the whole batch, and an iterator over batches is advanced once, so such
    steps run once, on the main thread. With manual optimisation so do all of the module's steps:
    its validation loss is then computed the same way in every run.
    """
    if not module.automatic_optimization:
        return "it sets automatic_optimization = False"
    for name in _STEPS[module.trainer.state.fn]:
        step = getattr(module, name)
        if step and is_param_in_hook_signature(step, "dataloader_iter", explicit=True):
            return f"its {name} takes dataloader_iter"
    return ""


_BETWEEN_STEPS = (
    *("on_train_batch_start", "on_train_batch_end", "on_before_batch_transfer"),
    *("on_after_batch_transfer", "transfer_batch_to_device", "on_before_backward", "backward"),
    *("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping"),
    *("optimizer_step", "on_before_zero_grad", "optimizer_zero_grad", "lr_scheduler_step"),
)


def has_user_hooks(trainer: Any) -> bool:
    """Whether code of the user's runs between two training steps: it may write to weights.

    A hook of the module, the data module or a callback that is not Lightning's.
    """
    owners = [trainer.lightning_module, getattr(trainer, "datamodule", None), *trainer.callbacks]
    hooks = [
        vars(owner).get(name) or getattr(type(owner), name, None)
        for owner in owners
        if owner is not None
        for name in _BETWEEN_STEPS
    ]
    packages = {getattr(hook, "__module__", "").partition(".")[0] for hook in hooks if hook}
    return not packages <= {"lightning", "pytorch_lightning", "lightning_dp"}
