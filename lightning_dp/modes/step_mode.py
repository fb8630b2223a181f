"""What happens to a batch and to a step of the user's LightningModule: step mode."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import UserDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_dp.metrics import Backwards, Journals, OwnRows, is_metric
from lightning_dp.modes.dataloader_iter import Pulled, takes_iterator
from lightning_dp.modes.manual_optimization import ManualOptimization
from lightning_dp.modes.schedules import Schedules
from lightning_dp.modes.transfer_hooks import TransferLook, own_hooks, transfers_plainly
from lightning_dp.parallel.batch import Shards, give_back_added, to_device
from lightning_dp.parallel.call import PlainTransfer
from lightning_dp.parallel.contexts import Contexts
from lightning_dp.parallel.engine import Engine
from lightning_dp.parallel.gradients import NoLossError
from lightning_dp.parallel.manual import ManualStep
from lightning_dp.parallel.replicas import Replicas, check_nothing_hidden
from lightning_dp.parallel.step import EvaluationStep, StepParallel, TrainingStep
from lightning_dp.state import shared_optimizers

if TYPE_CHECKING:
    from lightning_dp.parallel.processes import World

ModeName: TypeAlias = Literal["step", "forward"]
MODES: tuple[ModeName, ...] = ("step", "forward")

Transfer: TypeAlias = Callable[..., Any]
"""Lightning's transfer hooks: what is moved, where to, and `dataloader_idx`."""

_LIGHTNING = ("lightning.", "pytorch_lightning.")


class Mode(ABC):
    """How a strategy with several devices treats batches and steps; it makes their engine."""

    engine: Engine

    def __init__(
        self,
        module: LightningModule,
        devices: Sequence[torch.device],
        transfer: Transfer,
        output_device: torch.device,
        **options: Any,
    ) -> None:
        self._module = module
        self._transfer = transfer
        self._journals = self._new_journals(options.get("world"), devices, output_device)
        self._options = {"output_device": output_device, "rules": self._journals, **options}

    def _new_journals(self, world: World | None, devices: Any, output: Any) -> Journals:
        return Journals(self._module, devices, output, world)

    @abstractmethod
    def batch(self, batch: Any, dataloader_idx: int) -> Any:
        """What the loop gets for a batch as the DataLoader yielded it."""

    def during_backward(self) -> AbstractContextManager[None]:
        """What surrounds Lightning's own backward of a step's loss."""
        return self.engine.ranges.of("backward") if self.engine.is_heard else nullcontext()

    def to_be_scaled(self, loss: Tensor) -> Tensor:
        """A loss as a gradient scaler is to see it: on the root.

        Its scale lies where the first loss does. One on the host would read what the devices have
        found in gradients, and not wait for it.
        """
        root = self.engine.devices[0]
        return loss.to(root, non_blocking=True) if loss.device.type == "cpu" else loss

    def recover_backward(
        self, error: torch.OutOfMemoryError, context: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """Ends a backward that ran out of memory in the context of a step, or raises the error."""
        raise error

    def of_closure(self, result: Any) -> Any:
        """What an optimizer's closure has returned in one of several processes: of all of them."""
        return result

    def mute(self) -> None:
        """From now on, what replicas log or measure reaches nobody."""
        self._journals.replays = False

    @abstractmethod
    def step(self, method: str, batch: Any, args: tuple[Any, ...]) -> Any:
        """Runs a step for the whole batch, and returns what one device would have returned."""


class StepMode(Mode):
    """The step runs in every replica on its shard: the engine is a `StepParallel`."""

    def __init__(
        self, module: LightningModule, devices: Sequence[torch.device], **options: Any
    ) -> None:
        check_nothing_hidden(module, is_metric)
        super().__init__(module, devices, **options)
        self._manual = ManualOptimization(module)
        schedules = Schedules(module, is_sum=options.get("loss_reduction") == "sum")
        own = (self._journals, OwnRows(module), self._manual, schedules, module)
        context = partial(_around_step, *own)
        self.engine: StepParallel = StepParallel(module, devices, context=context, **self._options)
        self.engine.has_own_backward = not type(module).backward.__module__.startswith(_LIGHTNING)
        if module.automatic_optimization and self._journals.exchange is None:
            self.engine.around_backward = Backwards(self._journals, self.engine).around
        self._batch: Any = None
        self._call: EvaluationStep | None = None
        self._dataloader_idx = 0
        self._pulled: Pulled | None = None

    def batch(self, batch: Any, dataloader_idx: int) -> Any:
        """Leaves the batch where it is: the step cuts it first and then moves each shard.

        Hooks and callbacks between here and the step see the whole batch, and may still change it.
        """
        self._batch, self._call, self._dataloader_idx = batch, None, dataloader_idx
        return batch

    def step(self, method: str, batch: Any, args: tuple[Any, ...]) -> Any:
        """Runs it on all replicas; where it does not fit, again with fewer samples there."""
        if isinstance(batch, Iterator) and takes_iterator(getattr(self._module, method)):
            return self._step_of_iterator(method, batch)
        # An optimizer's closure may come for the same batch again.
        shards = self._call.shards if self._call and batch is self._batch else None
        is_plain = self.engine.ahead is not None and transfers_plainly(self._module)
        kind = PlainTransfer if is_plain else partial
        look, own = self._look, self._transfer
        own = own if look is None or shards is not None else look.around(method, own)
        transfer = kind(own, dataloader_idx=self._dataloader_idx)
        return self._run(method, batch, args, transfer, shards)

    @cached_property
    def _look(self) -> TransferLook | None:
        hooks = own_hooks(self._module)
        return TransferLook(hooks) if hooks else None

    def _step_of_iterator(self, method: str, iterator: Iterator[Any]) -> Any:
        engine = self.engine
        dims = engine.dims[method, method == "training_step"]
        pulled = self._pulled = Pulled(self._module, iterator, self._pulled, dims.dim)
        try:
            batch = pulled.first()
        except StopIteration:
            # The step itself is to see that there is no more.
            alone = Shards((1, *[0] * (len(engine.devices) - 1)), [iterator], whole=True, dims=dims)
            return self._run(method, iterator, (), to_device, alone)
        output = self._run(method, batch, (), pulled.of_replica)
        pulled.check_used(method)
        return output

    def _run(
        self,
        method: str,
        batch: Any,
        args: tuple[Any, ...],
        transfer: Callable[[Any, torch.device], Any],
        shards: Shards | None = None,
    ) -> Any:
        """Runs a step for a batch, which may have been cut already."""
        engine, training = self.engine, method == "training_step"
        self._batch, self._call = batch, None
        call: EvaluationStep
        if training and not self._module.automatic_optimization:
            # Not again if it does not fit: it has moved weights by then.
            call = ManualStep(engine, method, args, transfer)
            with self._manual.running(call):
                output = engine.step(call, batch if shards is None else shards)
        else:
            call = (TrainingStep if training else EvaluationStep)(engine, method, args, transfer)
            try:
                output = engine.run(call, batch, shards)
            except NoLossError as error:
                _refuse(self._module, error.output)
                raise
            self._call = call
        if self._look is not None:
            self._look.end(method, call.shards)
        if isinstance(batch, dict | UserDict):
            give_back_added(batch, call.shards, engine.output_device)
        return output

    def recover_backward(
        self, error: torch.OutOfMemoryError, context: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """Does the step and its backward again, with fewer samples where memory ran out."""
        call, self._call = self._call, None
        if call is None:
            raise error
        self.engine.rerun(call, self._batch, context, error)


def _refuse(module: LightningModule, output: Any) -> None:
    """Raises Lightning's own error about what a training step returned, if it has one."""
    loop = module.trainer.fit_loop.epoch_loop.automatic_optimization
    loop.output_result_cls.from_training_step_output(output)


def _around_step(
    journals: Journals,
    rows: OwnRows,
    manual: ManualOptimization,
    schedules: Schedules,
    module: LightningModule,
    replicas: Replicas,
    hook: str,
    shards: Shards,
    is_rerun: bool,
) -> AbstractContextManager[None]:
    """What replicas say to the outside, and what they do with optimizers, is said and done once."""
    said = journals.around(replicas, shards, is_rerun, hook)
    if rows.looks_left.get(hook) and len(shards.active) > 1:
        said = Contexts([said, rows.around(hook, len(shards.active))])
    if hook != "training_step":
        return said
    optimizers = manual.optimizers if manual.step else module.trainer.strategy.optimizers
    # Outside: its changes go, too, if a replay runs out of memory.
    shared = shared_optimizers(optimizers, replicas, shards.active[0], is_rerun=is_rerun)
    if manual.step:
        return Contexts([shared, said, manual.acting_together(manual.step)])
    if schedules.optimizers is optimizers and not schedules.found:
        return Contexts([shared, said])
    leader = shards.active[0]
    return Contexts([shared, *schedules.together(optimizers, leader, is_rerun=is_rerun), said])
