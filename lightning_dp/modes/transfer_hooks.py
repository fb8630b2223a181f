"""Transfer hooks: whether batches go to their devices by the user's code, and what that does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule

from lightning_dp.parallel.additive import Trace, has_told_of_related
from lightning_dp.parallel.batch import Shards

_MOVES, _AFTER = "transfer_batch_to_device", "on_after_batch_transfer"
_LIGHTNING = ("lightning.", "pytorch_lightning.")


def transfers_plainly(module: LightningModule) -> bool:
    """Whether neither the module nor its data module transfers batches itself.

    Code of the user's may compute with what it transfers, and finds the batch on the host, and the
    device's current stream, as on one device.
    """
    return _MOVES not in own_hooks(module)


def own_hooks(module: LightningModule) -> set[str]:
    """Which hooks of those that each shard goes through are the module's, or its data module's."""
    owners: list[Any] = [module, module.trainer.datamodule]  # type: ignore[attr-defined]  # typed too narrowly
    found = [_own_hooks(owner) for owner in owners if owner is not None]
    return {hook for hooks in found for hook in hooks}


def _own_hooks(owner: Any) -> Iterator[str]:
    """Those that are not of Lightning's class, and those of the instance."""
    for hook in (_MOVES, _AFTER):
        cls = next(cls for cls in type(owner).__mro__ if hook in vars(cls))
        if hook in vars(owner) or not cls.__module__.startswith(_LIGHTNING):
            yield hook


class TransferLook:
    """At what hooks of the user's make of shards: what samples have of each other there is told.

    Once for each method that runs on replicas, where their shards are unequal.
    """

    def __init__(self, hooks: set[str]) -> None:
        self._hook = _AFTER if _AFTER in hooks else _MOVES
        self._seen: set[str] = set()
        self._traces: list[Trace] = []

    def around(self, method: str, transfer: Callable[..., Any]) -> Callable[..., Any]:
        """A transfer that is traced, unless this method was looked at."""
        self._traces = []
        return transfer if method in self._seen else partial(self._traced, transfer)

    def _traced(
        self, transfer: Callable[..., Any], part: Any, device: torch.device, **options: Any
    ) -> Any:
        with Trace(part) as trace:
            moved = transfer(part, device, **options)
        trace.note(moved)
        self._traces.append(trace)
        return moved

    def end(self, method: str, shards: Shards) -> None:
        """All shards have gone through the hooks, once each."""
        sizes, traces, self._traces = shards.active_sizes, self._traces, []
        if len(traces) == len(sizes) and len({*sizes}) > 1:
            self._seen.add(method)
            has_told_of_related(
                self._hook, traces, sizes, "on_before_batch_transfer has the batch."
            )
