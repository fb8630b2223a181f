"""Forward mode: a step runs once, on the main thread; calls of the module in it are spread.

Manual optimisation and steps that take `dataloader_iter` always run so: optimizers, closures,
toggling and schedulers are then Lightning's own code, and the iterator is advanced once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch.profiler import record_function
from typing_extensions import override

from lightning_dp.lightning_private import own_device
from lightning_dp.mode import Mode, Transfer
from lightning_dp.parallel.contexts import replaced
from lightning_dp.parallel.forward import ForwardParallel
from lightning_dp.recording import StepRecorder, is_metric
from lightning_dp.state import warn_of_step


class ForwardMode(Mode):
    """Runs each step once, with the whole batch; its engine is a `ForwardParallel`.

    Args:
        module, devices, transfer: as for every mode.
        output_device: where the batch and the step's own computations are.
        move_batch: whether the batch is brought there, or stays where the DataLoader left it.
        options: of the engine, see `Engine`.
    """

    def __init__(
        self,
        module: LightningModule,
        devices: Sequence[torch.device],
        *,
        transfer: Transfer,
        output_device: torch.device,
        move_batch: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(module, transfer)
        self.moves_batch = move_batch
        for submodule in module.modules():
            if is_metric(submodule):
                submodule.to(output_device)
        recorder = StepRecorder(module, devices, output_device)

        @contextmanager
        def around_call(*call: Any) -> Iterator[None]:
            # What replicas log and measure is joined, as step mode does for a step.
            with recorder.around(*call), _at(module, devices[0]):
                yield

        self.engine: ForwardParallel = ForwardParallel(
            module,
            devices,
            output_device=output_device,
            own_attributes=recorder.own_attributes,
            scalars="merge",
            context=around_call,
            **options,
        )
        # Steps whose first run with a result has not been looked at.
        self._to_check = {"training_step", "validation_step", "test_step", "predict_step"}

    @override
    def batch(self, batch: Any, dataloader_idx: int) -> Any:
        """Moves the batch to the output device."""
        if not self.moves_batch:
            return batch
        return self.transfer(batch, self.engine.output_device, dataloader_idx=dataloader_idx)

    @override
    def step(self, method: str, batch: Any, args: tuple[Any, ...]) -> Any:
        """Calls the step, and warns if the first one spread nothing."""
        num_cut = self.engine.num_cut
        with self.engine.spreading(), _at(self.module, self.engine.output_device):
            output = getattr(self.module, method)(batch, *args)
        # A step without a result may compute nothing; one of manual optimisation returns nothing.
        by_hand = method == "training_step" and not self.module.automatic_optimization
        if method in self._to_check and (by_hand or output is not None):
            self._to_check.discard(method)
            if self.engine.num_cut == num_cut:
                self._to_check.clear()
                self._warn_of_no_spread(method)
        return output

    def _warn_of_no_spread(self, method: str) -> None:
        children = self.module.named_children()
        names = [name for name, child in children if next(child.parameters(), None) is not None]
        warn_of_step(
            self.module,
            f"{type(self.module).__qualname__}.{method}: expected calls that are spread over the "
            f"devices, got none, so that all ran on {self.engine.devices[0]}. Call self(...) with "
            "tensors that have a row per sample, or name the submodules that the step calls: "
            f"DataParallelStrategy(mode='forward', parallel_modules={names[:6]}).",
        )

    @contextmanager
    @override
    def during_backward(self) -> Iterator[None]:
        """Keeps calls spread: a checkpoint calls the module again in the backward."""
        here = _at(self.module, self.engine.output_device)
        with record_function("lightning_dp.backward"), self.engine.spreading(), here:
            yield


def _at(module: LightningModule, device: torch.device) -> AbstractContextManager[None]:
    """Sets `self.device` of the module for a while."""
    return replaced(module, **own_device(module, device))
