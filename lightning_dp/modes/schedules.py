"""Schedules of learning rates that steps advance themselves: once for all replicas.

Where the module optimises by hand, see `manual_optimization`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from lightning_dp.parallel.batch import Shards
from lightning_dp.parallel.workers import Calls, current_participant
from lightning_dp.state import SharedMethods, tools_of


class Schedules:
    """Those that a training step can get hold of: the trainer's, and those on the module.

    Attributes:
        found: they, as the first step has found them; None before.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module, self._shared = module, SharedMethods()
        self.found: list[LRScheduler] | None = None

    def together(self, shards: Shards) -> list[AbstractContextManager[Any]]:
        """While these last, replicas that advance a schedule do it together, and once."""
        if self.found is None:
            configs = self._module.trainer.strategy.lr_scheduler_configs
            tools = tools_of(self._module, [config.scheduler for config in configs])
            self.found = [tool for tool in tools if isinstance(tool, LRScheduler)]
        leader = shards.active[0]
        return [
            self._shared.standing_in(own, {"step": partial(_step_together, own.step)}, leader)
            for own in self.found
        ]


def _step_together(step: Any, *args: Any, **kwargs: Any) -> Any:
    participant = current_participant()
    if participant is None:
        return step(*args, **kwargs)
    return participant.meet("step of a schedule", (args, kwargs), partial(_step_once, step))


def _step_once(step: Any, calls: Calls, arguments: list[Any]) -> list[Any]:
    """With what the replicas give, each of its shard, made that of the batch."""
    args = [_of_all(values, calls) for values in zip(*[args for args, _ in arguments], strict=True)]
    names = arguments[0][1]
    kwargs = {name: _of_all([own[name] for _, own in arguments], calls) for name in names}
    return [step(*args, **kwargs)] * len(arguments)


def _of_all(values: Any, calls: Calls) -> Any:
    sizes = calls.sizes or [1] * len(values)
    if not all([isinstance(value, float | Tensor) for value in values]):
        return values[0]
    return sum(float(v) * n for v, n in zip(values, sizes, strict=True)) / sum(sizes)
