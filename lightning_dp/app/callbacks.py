"""Callbacks of the programs."""

import operator
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn


class InterruptedCheckpoint(Callback):
    """Saves a checkpoint when Ctrl-C or an error ends training after its first step.

    Keeps out of the way of errors that come before there is anything to save, so that these reach
    the user as they are. Lightning's OnExceptionCheckpoint does not, and makes ``fit`` look for a
    checkpoint to resume from, too.

    Where a strategy has started several processes there is only the last epoch's checkpoint.

    Args:
        dirpath: folder of the file.
        filename: its name.
    """

    def __init__(self, dirpath: str | os.PathLike[str], filename: str = "interrupted.ckpt") -> None:
        super().__init__()
        self.path = Path(dirpath) / filename

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Saves the checkpoint if the training has taken a step."""
        training = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        # Saving is collective, and several processes are never stopped at the same point.
        alone = trainer.world_size == 1
        # Lightning sets the attribute from outside the class, where type checkers do not see it.
        dry = getattr(trainer, "fast_dev_run", False)
        if training and alone and trainer.global_step > 0 and not dry:
            trainer.save_checkpoint(self.path, weights_only=False)


class SamplesTested(Callback):
    """Counts the samples that each device gets in a test, where a strategy shares them out.

    In forward mode those of the latest spread call of every step count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.per_device: tuple[int, ...] = ()  # empty if they were not shared out

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forgets the test before."""
        self.per_device = ()

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        """Adds a batch."""
        sizes: tuple[int, ...] = getattr(trainer.strategy, "last_sizes", ())
        self.per_device = tuple(map(operator.add, self.per_device, sizes)) or sizes


class SimulatedSpeeds(Callback):
    """Gives simulated devices speeds of their own while they train.

    Args:
        factors: for each device how long an op takes on it, relative to the others: 4 is a quarter
            of the speed. 0: no time but the CPU's own.
        seconds_per_element: what each element of an op's output takes where the factor is 1.
        from_step: the training batch from which on; until then every factor is 1.

    Raises:
        ValueError: when training begins, if the devices are not simulated, or not as many.
    """

    def __init__(
        self, factors: Sequence[float], *, seconds_per_element: float = 2e-8, from_step: int = 0
    ) -> None:
        super().__init__()
        self._factors = list(factors)
        self._seconds_per_element = seconds_per_element
        self._from_step = from_step
        self._devices: list[torch.device] = []
        self._batches = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins with equal devices."""
        devices = getattr(trainer.strategy, "parallel_devices", None) or []
        if [device.type for device in devices] != ["sim"] * len(self._factors):
            got = ", ".join(map(str, devices)) or str(trainer.strategy.root_device)
            raise ValueError(
                f"factors: expected one for each simulated device, got {self._factors} for {got}. "
                f"Use trainer=sim trainer.devices={len(self._factors)}, or other factors."
            )
        self._devices, self._batches = devices, 0
        self._set_speeds([1.0] * len(devices))

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        """Makes them unequal when it is time to."""
        if self._batches == self._from_step:
            self._set_speeds(self._factors)
        self._batches += 1

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leaves the devices at full speed."""
        self._set_speeds([0.0] * len(self._devices))

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Leaves the devices at full speed."""
        self._set_speeds([0.0] * len(self._devices))

    def _set_speeds(self, factors: Sequence[float]) -> None:
        for device, factor in zip(self._devices, factors, strict=True):
            module = torch.get_device_module(device)
            module.set_speed(device, seconds_per_element=factor * self._seconds_per_element)
