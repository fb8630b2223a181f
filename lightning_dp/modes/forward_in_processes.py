"""Forward mode in several processes: what a step computes, logs and measures is of all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from lightning.pytorch import LightningModule

from lightning_dp.metrics import HostJournals, SpreadJournals
from lightning_dp.parallel.batch import infer_for
from lightning_dp.parallel.forward import ForwardParallel
from lightning_dp.parallel.forward_losses import ForwardLosses
from lightning_dp.parallel.gradients import LossReduction
from lightning_dp.parallel.processes import World


class ForwardInProcesses:
    """Steps that every process runs once, with its part of the batch, and spreads itself.

    Attributes:
        journals: of the replicas in spread calls.
    """

    def __init__(
        self,
        module: LightningModule,
        world: World,
        devices: Sequence[torch.device],
        output_device: torch.device,
    ) -> None:
        self._module, self._world = module, world
        self._host = HostJournals(module, output_device, world)
        self.journals = SpreadJournals(module, devices, output_device, self._host)

    def engine(
        self,
        loss_reduction: LossReduction,
        module: LightningModule,
        devices: Sequence[torch.device],
        **options: Any,
    ) -> ForwardParallel:
        """The engine that spreads calls."""
        self._engine = _Engine(module, devices, **options)
        self._engine.host = self._host
        self._losses = ForwardLosses(self._engine, self._world, loss_reduction)
        self._dim = options.get("dim", 0)
        return self._engine

    def step(self, method: str, call: Callable[[], Any], batch: Any) -> Any:
        """Calls a step; what it is to return."""
        training = method == "training_step"
        size = infer_for(self._engine.asked, batch, self._dim).size
        if not size:
            raise ValueError(
                "Expected a batch whose samples can be counted, as what every process computes "
                f"weighs what its samples do, got {type(batch).__qualname__} without any. Define "
                "batch_size(batch) on the module, which says how many samples there are."
            )
        dims = self._engine.dims[method, training]
        with self._host.around_step(size, dims, replays=self.journals.replays):
            if not training:
                return call()
            by_hand = not self._module.automatic_optimization
            return self._losses.step(call, size, by_hand=by_hand)

    def during_backward(self) -> AbstractContextManager[None]:
        """What surrounds a backward, in which checkpoints call the module again."""
        return self._host.around_backward()

    def of_closure(self, result: Any) -> Any:
        """What an optimizer's closure has returned: automatic optimisation has joined its loss."""
        return result if self._module.automatic_optimization else self._losses.number(result)


class _Engine(ForwardParallel):
    """Replicas follow the module's attributes, and not what records a step on it."""

    host: HostJournals

    def call(self, path: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """As every such engine; meanwhile nothing records on the module itself."""
        with self.host.paused():
            return super().call(path, args, kwargs)
