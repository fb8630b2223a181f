"""The two modes: what happens to a batch and to a step of the user's LightningModule."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lightning_dp.manual_optimization import ManualOptimization
from lightning_dp.metrics import Journals, is_metric
from lightning_dp.parallel.batch import Shards
from lightning_dp.parallel.engine import Engine
from lightning_dp.parallel.forward import ForwardParallel
from lightning_dp.parallel.gradients import loss_of
from lightning_dp.parallel.replicas import Replicas, check_nothing_hidden
from lightning_dp.parallel.split import Plan
from lightning_dp.parallel.step import StepParallel
from lightning_dp.state import changed_once

ModeName: TypeAlias = Literal["step", "forward"]
MODES: tuple[ModeName, ...] = ("step", "forward")

Transfer: TypeAlias = Callable[[Any, torch.device, int], Any]
"""Lightning's transfer hooks: what is moved, where to, and the index of its DataLoader."""

_LIGHTNING = ("lightning.", "pytorch_lightning.")
_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class Mode(ABC):
    """How a strategy with several devices treats batches and steps.

    Args:
        module: the user's module, on the root device.
        devices: the replicas' devices, root first.
        transfer: moves a batch, or a shard of it.
        output_device: where loss, logs and gathered outputs end up.

    Attributes:
        engine: what runs the replicas.
    """

    engine: Engine

    def __init__(
        self,
        module: LightningModule,
        devices: Sequence[torch.device],
        transfer: Transfer,
        output_device: torch.device,
    ) -> None:
        self._module = module
        self._transfer = transfer
        self._journals = Journals(module, devices, output_device)

    @abstractmethod
    def batch(self, batch: Any, dataloader_idx: int) -> Any:
        """What the loop gets for a batch as the DataLoader yielded it."""

    def during_backward(self) -> AbstractContextManager[None]:
        """What surrounds Lightning's own backward of a step's loss."""
        return self.engine.ranges.of("backward")

    def recover_backward(
        self, error: torch.OutOfMemoryError, context: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """Ends a backward that ran out of memory, or raises the error.

        Args:
            error: what the backward raised.
            context: makes what surrounds a training step.
        """
        raise error

    def mute(self) -> None:
        """From now on, what replicas log or measure reaches nobody."""
        self._journals.replays = False

    @abstractmethod
    def step(self, method: str, batch: Any, args: tuple[Any, ...]) -> Any:
        """Runs a step for the whole batch, and returns what one device would have returned."""


class StepMode(Mode):
    """The step runs in every replica on its shard.

    Args:
        module: see `Mode`.
        devices: see `Mode`.
        transfer: moves a shard to its device.
        output_device: see `Mode`.
        options: of the engine, see `StepParallel`.
    """

    def __init__(
        self,
        module: LightningModule,
        devices: Sequence[torch.device],
        *,
        transfer: Transfer,
        output_device: torch.device,
        **options: Any,
    ) -> None:
        _check_step_mode(module)
        super().__init__(module, devices, transfer, output_device)
        self._manual = ManualOptimization(module)
        around = partial(_around_step, self._journals, self._manual)
        options |= {"rules": self._journals, "around": around}
        self.engine: StepParallel = StepParallel(
            module, devices, output_device=output_device, **options
        )
        self.engine.has_own_backward = not type(module).backward.__module__.startswith(_LIGHTNING)
        self._batch: Any = None
        self._shards: Shards | None = None
        self._dataloader_idx = 0
        self._latest: tuple[str, tuple[Any, ...]] = ("", ())

    def batch(self, batch: Any, dataloader_idx: int) -> Any:
        """Leaves the batch where it is: the step cuts it first and then moves each shard.

        Hooks and callbacks between here and the step see the whole batch, and may still change it.
        """
        self._batch, self._shards, self._dataloader_idx = batch, None, dataloader_idx
        return batch

    def step(self, method: str, batch: Any, args: tuple[Any, ...]) -> Any:
        """Runs it on all replicas; where it does not fit, again with fewer samples there."""
        training = method == "training_step"
        if training and not self._module.automatic_optimization:
            # Not again if it does not fit: it has moved weights by then.
            shards = self.engine.scatter(batch, self._to_device)
            return self._manual.run(self.engine, method, shards, args)
        run = self.engine.train if training else self.engine.evaluate
        self._latest = (method, args)

        def attempt() -> Any:
            # An optimizer's closure may come for the same batch again.
            shards, self._shards = self._shards if batch is self._batch else None, None
            if shards is None:
                shards = self.engine.scatter(batch, self._to_device, training=training)
            output = run(method, shards, *args)
            self._batch, self._shards = batch, shards
            return output

        trial = partial(self._try_part, batch, training)
        return self.engine.fitting(method, attempt, trial, training=training)

    def recover_backward(
        self, error: torch.OutOfMemoryError, context: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """Does the step and its backward again, with fewer samples where memory ran out.

        What the step has logged and left on the module was right, and stays.
        """
        gradient = self.engine.interrupted()
        if gradient is None:
            raise error
        (method, args), batch, self._shards = self._latest, self._batch, None

        def attempt() -> None:
            shards = self.engine.scatter(batch, self._to_device)
            with context(), self.engine.rerunning():
                loss = loss_of(self.engine.train(method, shards, *args))
            if loss is not None:
                self.engine.run_backward(loss, gradient)

        trial = partial(self._try_part, batch, True)
        self.engine.fitting(f"{method}'s backward", attempt, trial, training=True, failure=error)

    def _try_part(self, batch: Any, training: bool, plan: Plan) -> None:
        method, args = self._latest
        shards = self.engine.scatter(batch, self._to_device, training=training, plan=plan)
        if training:
            self.engine.train_apart(method, shards, *args)
        else:
            with self.engine.rerunning():
                self.engine.evaluate(method, shards, *args)

    def _to_device(self, shard: Any, device: torch.device) -> Any:
        return self._transfer(shard, device, self._dataloader_idx)


class ForwardMode(Mode):
    """The step runs once, with the whole batch; the module's calls are spread over the replicas.

    Args:
        module: see `Mode`.
        devices: see `Mode`.
        transfer: moves a batch to the output device.
        output_device: see `Mode`.
        move_batch: whether it does; else the batch stays where the DataLoader left it.
        options: of the engine, see `ForwardParallel`.
    """

    def __init__(
        self,
        module: LightningModule,
        devices: Sequence[torch.device],
        *,
        transfer: Transfer,
        output_device: torch.device,
        move_batch: bool,
        **options: Any,
    ) -> None:
        super().__init__(module, devices, transfer, output_device)
        # The mode itself would be a cycle, which keeps replicas alive until it is found.
        around = partial(_around_forward, self._journals, module, devices[0])
        options |= {"rules": self._journals, "around": around}
        self.engine: ForwardParallel = ForwardParallel(
            module, devices, output_device=output_device, **options
        )
        self._move_batch = move_batch
        for submodule in module.modules():
            if is_metric(submodule):
                submodule.to(output_device)  # where the step's tensors are

    def batch(self, batch: Any, dataloader_idx: int) -> Any:
        """Brings the batch to the output device, where the step's own computations are."""
        if not self._move_batch:
            return batch
        return self._transfer(batch, self.engine.output_device, dataloader_idx)

    def step(self, method: str, batch: Any, args: tuple[Any, ...]) -> Any:
        """Calls it once, on this thread."""
        with self.engine.spreading(), _self_device(self._module, self.engine.output_device):
            return getattr(self._module, method)(batch, *args)

    @contextlib.contextmanager
    def during_backward(self) -> Iterator[None]:
        """Checkpoints call the module again, and must find the calls spread as they were."""
        here = _self_device(self._module, self.engine.output_device)
        with super().during_backward(), self.engine.spreading(), here:
            yield


@contextlib.contextmanager
def _around_step(
    journals: Journals,
    manual: ManualOptimization,
    replicas: Replicas,
    hook: str,
    shards: Shards,
    args: tuple[Any, ...],
    is_rerun: bool,
) -> Iterator[None]:
    """What replicas say to the outside, and what they do with optimizers, is said and done once."""
    optimizers = manual.optimizers if hook == "training_step" else []
    with (
        journals.around(replicas, hook, shards, args, is_rerun),
        changed_once(optimizers, shards.active[0], is_rerun=is_rerun),
        manual.acting_together(replicas),
    ):
        yield


@contextlib.contextmanager
def _around_forward(
    journals: Journals, module: LightningModule, device: torch.device, *step: Any
) -> Iterator[None]:
    """What replicas log and measure inside of a spread call is joined as in a step."""
    with journals.around(*step), _self_device(module, device):
        yield


@contextlib.contextmanager
def _self_device(module: LightningModule, device: torch.device) -> Iterator[None]:
    """`self.device` is where the running code's tensors are."""
    before = module._device
    module._device = device
    try:
        yield
    finally:
        module._device = before


def check_mode_options(mode: str, parallel_modules: Sequence[str], move_batch: bool) -> None:
    """Refuses options of forward mode that cannot be, or that step mode would ignore."""
    if isinstance(parallel_modules, str):
        raise ValueError(
            f"parallel_modules: expected a list of names, got {parallel_modules!r}. "
            f"Write [{parallel_modules!r}]."
        )
    if mode == "step" and (parallel_modules or not move_batch):
        key, value = (
            ("parallel_modules", list(parallel_modules))
            if parallel_modules
            else ("move_batch", move_batch)
        )
        raise ValueError(
            f'{key}: expected to be left out in step mode, got {value}. Use mode="forward", in '
            "which it has a meaning."
        )


def _check_step_mode(module: LightningModule) -> None:
    name = type(module).__qualname__
    check_nothing_hidden(module)
    for step in _STEPS:
        if is_param_in_hook_signature(getattr(module, step), "dataloader_iter", explicit=True):
            raise ValueError(
                f"{name}.{step}: expected (self, batch, batch_idx), got dataloader_iter: step mode "
                "has to see a batch to split it. Take the batch, or use "
                'DataParallelStrategy(mode="forward").'
            )
