"""Schedules of learning rates that steps advance themselves: once for all replicas.

Where the module optimises by hand, see `manual_optimization`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_dp.modes.manual_optimization import Arguments, together
from lightning_dp.parallel.contexts import Lasting
from lightning_dp.parallel.workers import Calls
from lightning_dp.state import SharedMethods, tools_of


class Schedules:
    """Those that a training step can get hold of: the trainer's, and those on the module.

    Args:
        module: the user's.
        is_sum: whether losses are sums over samples, and not means.

    Attributes:
        found: they.
        optimizers: the trainer's list of these when they were found; it makes schedules with them.
    """

    def __init__(self, module: LightningModule, *, is_sum: bool) -> None:
        self._module, self._is_sum, self._shared = module, is_sum, SharedMethods()
        self.found: list[LRScheduler] = []
        self.optimizers: Sequence[Optimizer] | None = None

    def together(
        self, optimizers: Sequence[Optimizer], leader: int, *, is_rerun: bool
    ) -> Iterator[AbstractContextManager[Any]]:
        """While these last, replicas that advance a schedule do it together, and once.

        A rerun, and a step that did not fit and will run again, leave it where it was.
        """
        if self.optimizers is not optimizers:
            configs = self._module.trainer.strategy.lr_scheduler_configs
            tools = tools_of(self._module, [config.scheduler for config in configs])
            self.found = [tool for tool in tools if isinstance(tool, LRScheduler)]
            self.optimizers = optimizers
        for schedule in self.found:
            advanced = _Advanced(schedule, is_sum=self._is_sum, keeps=not is_rerun)
            step = together("step of a schedule", schedule.step, advanced.act)
            yield advanced
            yield self._shared.standing_in(schedule, {"step": step}, leader)


class _Advanced(Lasting):
    """One schedule in one step."""

    def __init__(self, schedule: LRScheduler, *, is_sum: bool, keeps: bool) -> None:
        self._schedule, self._is_sum, self._keeps = schedule, is_sum, keeps
        self._step = schedule.step
        self._before: dict[str, Any] | None = None

    def begin(self) -> None:
        """It is where it was."""

    def act(self, calls: Calls, arguments: list[Arguments]) -> list[Any]:
        """Advances it, by what the replicas give, each of its shard, made that of the batch."""
        if self._before is None:
            self._before = copy.deepcopy(self._schedule.state_dict())
        args = [self._of_all(calls, own) for own in zip(*[a for a, _ in arguments], strict=True)]
        names = arguments[0][1]
        kwargs = {name: self._of_all(calls, [own[name] for _, own in arguments]) for name in names}
        result: Any = self._step(*args, **kwargs)
        return [result] * len(arguments)

    def _of_all(self, calls: Calls, values: Sequence[Any]) -> Any:
        if not all([isinstance(value, float | Tensor) for value in values]):
            return values[0]
        sizes, is_sum = calls.sizes or [1] * len(values), self._is_sum
        weights = [1.0 if is_sum else size / sum(sizes) for size in sizes]
        own = sum([float(v) * weight for v, weight in zip(values, weights, strict=True)])
        if calls.world is None:
            return own
        from lightning_dp.parallel.processes import OwnLoss, join_processes

        samples = 0 if calls.is_idle else sum(sizes)
        return join_processes(OwnLoss(own, samples), calls.world, is_sum=is_sum).value

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """It stays where it is, unless the step runs again."""
        if kind is not None and issubclass(kind, torch.OutOfMemoryError):
            self._keeps = False
        super().__exit__(kind, *error)

    def end(self) -> None:
        """It is where the step leaves it."""
        if self._before is not None and not self._keeps:
            self._schedule.load_state_dict(self._before)
