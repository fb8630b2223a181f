"""Step mode: a step runs in every replica on its shard; loss, outputs and logs are joined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from torch.profiler import record_function
from typing_extensions import override

from lightning_dp.mode import Mode, Transfer
from lightning_dp.parallel.replicate import layers_in
from lightning_dp.parallel.step import EvaluationStep, NoLossError, StepParallel, TrainingStep
from lightning_dp.parallel.torch_private import is_profiling
from lightning_dp.recording import StepRecorder, is_metric

if TYPE_CHECKING:
    from lightning_dp.parallel.processes import World


class StepMode(Mode):
    """Runs each step in every replica; its engine is a `StepParallel`.

    Args:
        module, devices, transfer: as for every mode.
        output_device: where loss, logs and outputs end up.
        world: the processes that train together; None if this is the only one.
        options: of the engine, see `StepParallel`.
    """

    def __init__(
        self,
        module: LightningModule,
        devices: Sequence[torch.device],
        *,
        transfer: Transfer,
        output_device: torch.device,
        world: World | None = None,
        **options: Any,
    ) -> None:
        super().__init__(module, transfer)
        check_layers_are_registered(module)
        recorder = StepRecorder(module, devices, output_device, world)
        self.engine: StepParallel = StepParallel(
            module,
            devices,
            output_device=output_device,
            world=world,
            own_attributes=recorder.own_attributes,
            context=recorder.around,
            **options,
        )
        package = type(module).backward.__module__.partition(".")[0]
        self.engine.has_own_backward = package not in ("lightning", "pytorch_lightning")
        self._batch: Any = None
        self._call: EvaluationStep | None = None  # of `_batch`

    @override
    def batch(self, batch: Any, dataloader_idx: int) -> Any:
        """Returns the batch as it is: the step cuts it, and then moves each shard.

        Hooks and callbacks before the step see the whole batch, and may still change it.
        """
        self._batch, self._call, self.dataloader_idx = batch, None, dataloader_idx
        return batch

    @override
    def step(self, method: str, batch: Any, args: tuple[Any, ...]) -> Any:
        """Runs it on all replicas; after out-of-memory again, with fewer samples there."""
        training = method == "training_step"
        if training and not self.module.automatic_optimization:
            raise RuntimeError(
                "Expected automatic_optimization to stay True during a fit that began with True, "
                "got False. Set it in __init__, or use DataParallelStrategy(mode='forward')."
            )
        # An optimizer's closure may run the step again for the same batch, which is cut already.
        shards = self._call.shards if self._call and batch is self._batch else None
        transfer = partial(self.transfer, dataloader_idx=self.dataloader_idx)
        call = (TrainingStep if training else EvaluationStep)(self.engine, method, args, transfer)
        self._batch, self._call = batch, None
        try:
            output = self.engine.run(call, batch, shards)
        except NoLossError as error:
            # Lightning raises its own error for most outputs that are no loss.
            loop = self.module.trainer.fit_loop.epoch_loop.automatic_optimization
            loop.output_result_cls.from_training_step_output(error.output)
            raise
        self._call = call
        return output

    @override
    def during_backward(self) -> AbstractContextManager[Any]:
        return record_function("lightning_dp.backward") if is_profiling() else nullcontext()

    @override
    def recover_backward(
        self, error: torch.OutOfMemoryError, context: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """Runs the step and its backward again, with fewer samples where memory ran out."""
        call, self._call = self._call, None
        if call is None:
            raise error
        self.engine.rerun(call, self._batch, context, error)


def check_layers_are_registered(root: LightningModule) -> None:
    """Raises a ValueError for layers with weights or buffers in plain containers only.

    Not for Lightning's hyperparameters, which are in a dict of a class of its own.
    """
    known = {*map(id, root.modules())}
    for module in root.modules():
        for name, value in vars(module).items():
            for path, hidden in layers_in(value, name):
                if id(hidden) in known or is_metric(hidden):
                    continue
                if [*hidden.parameters(), *hidden.buffers()]:
                    raise ValueError(
                        f"{type(module).__qualname__}.{path}: expected layers to be registered, "
                        f"got {type(hidden).__qualname__} in a plain container: it is neither "
                        "moved nor trained nor saved. Use an nn.ModuleList or an nn.ModuleDict."
                    )
