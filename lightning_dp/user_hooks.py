"""Whether code of the user's runs between two training steps: it may write to weights."""

from __future__ import annotations

from typing import Any

_BETWEEN_STEPS = (
    *("on_train_batch_start", "on_train_batch_end", "on_before_batch_transfer"),
    *("on_after_batch_transfer", "transfer_batch_to_device", "on_before_backward", "backward"),
    *("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping"),
    *("optimizer_step", "on_before_zero_grad", "optimizer_zero_grad", "lr_scheduler_step"),
)
_LIGHTNING = ("lightning.", "pytorch_lightning.", "lightning_dp.")


def has_user_hooks(trainer: Any) -> bool:
    """Whether the module, the data module or a callback has a hook that is not Lightning's."""
    owners = [trainer.lightning_module, getattr(trainer, "datamodule", None), *trainer.callbacks]
    hooks = (getattr(type(owner), name, None) for owner in owners for name in _BETWEEN_STEPS)
    return any(hook is not None and not hook.__module__.startswith(_LIGHTNING) for hook in hooks)
