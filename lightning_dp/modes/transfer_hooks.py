"""Transfer hooks: whether batches go to their devices by the user's code, or by Lightning's."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule

_HOOK = "transfer_batch_to_device"
_LIGHTNING = ("lightning.", "pytorch_lightning.")


def transfers_plainly(module: LightningModule) -> bool:
    """Whether neither the module nor its data module transfers batches itself.

    Code of the user's may compute with what it transfers, and finds the batch on the host, and the
    device's current stream, as on one device.
    """
    owner: Any
    for owner in (module, module.trainer.datamodule):  # type: ignore[attr-defined]  # typed too narrowly
        if owner is not None and not _is_lightnings(owner):
            return False
    return True


def _is_lightnings(owner: Any) -> bool:
    """Whether the hook is that of Lightning's class, and not one of the instance."""
    if _HOOK in vars(owner):
        return False
    cls = next(cls for cls in type(owner).__mro__ if _HOOK in vars(cls))
    return cls.__module__.startswith(_LIGHTNING)
