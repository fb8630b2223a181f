"""`Trainer(sync_batchnorm=True)`: batch norm over all replicas."""

from __future__ import annotations

import warnings
from types import MethodType

from lightning.pytorch.plugins.layer_sync import LayerSync, TorchSyncBatchNorm
from torch import nn
from typing_extensions import override

from lightning_dp.parallel.apply import sync_batch_norm as batch_norm
from lightning_dp.parallel.torch_private import BATCH_NORMS


class ReplicaBatchNorm(LayerSync):
    """Batch norm layers normalise by the whole batch; running statistics are the batch's.

    A layer keeps its class, parameters, buffers and hooks; `apply` gives it another `forward`,
    which `revert` removes. Checkpoints have the same keys. Layers of a class that overrides
    `forward` are left as they are, with a warning.
    """

    @override
    def apply(self, model: nn.Module) -> nn.Module:
        others = set()
        for module in model.modules():
            if batch_norm.can_be_synced(module):
                module.__dict__["forward"] = MethodType(batch_norm.forward, module)
            elif isinstance(module, BATCH_NORMS) and not batch_norm.is_synced(module):
                others.add(type(module).__qualname__)
        if others:
            warnings.warn(
                f"sync_batchnorm=True: expected layers with torch's own forward, got also "
                f"{', '.join(sorted(others))}, which keep to the statistics of their shards.",
                stacklevel=2,
            )
        return model

    @override
    def revert(self, model: nn.Module) -> nn.Module:
        for module in model.modules():
            if batch_norm.is_synced(module):
                del module.__dict__["forward"]
        return model


def replicas_own(layer_sync: LayerSync) -> LayerSync:
    """Replaces Lightning's plugin, which is for processes, and keeps any other."""
    # By name, since the packages `lightning` and `pytorch_lightning` have one each.
    is_lightnings = type(layer_sync).__qualname__ == TorchSyncBatchNorm.__qualname__
    return ReplicaBatchNorm() if is_lightnings else layer_sync
