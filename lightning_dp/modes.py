"""A mode decides what a strategy with several devices does with the loop's batches and steps.

In step mode a step runs in every replica on its shard, and loss, outputs and logs are joined. In
forward mode it runs once, on the main thread, and calls of the module in it are spread: manual
optimisation and steps that take `dataloader_iter` always run so, since optimizers, closures,
toggling and schedulers are then Lightning's own code, and the iterator is advanced once.
`auto_split` puts either mode aside for steps that are fastest on the root alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.profiler import record_function
from typing_extensions import override

from lightning_dp.lightning_private import own_device
from lightning_dp.module_state import warn_of_step
from lightning_dp.parallel.contexts import replaced
from lightning_dp.parallel.engine import Engine
from lightning_dp.parallel.forward import ForwardParallel
from lightning_dp.parallel.replicate import layers_in
from lightning_dp.parallel.step import EvaluationStep, NoLossError, StepParallel, TrainingStep
from lightning_dp.parallel.torch_private import is_profiling
from lightning_dp.recording import StepRecorder, is_metric

if TYPE_CHECKING:
    from lightning_dp.parallel.processes import World

Transfer: TypeAlias = Callable[..., Any]
"""Lightning's transfer hooks: called with a batch or shard, a device and `dataloader_idx`."""


class Mode(ABC):
    """Runs the steps of one LightningModule on an engine that it makes."""

    engine: Engine
    dataloader_idx = 0  # of the latest batch

    def __init__(self, module: LightningModule, transfer: Transfer) -> None:
        self.module, self.transfer = module, transfer

    @abstractmethod
    def batch(self, batch: Any, dataloader_idx: int) -> Any:
        """Returns what the loop passes to hooks and to the step for a batch of the DataLoader."""

    @abstractmethod
    def step(self, method: str, batch: Any, args: tuple[Any, ...]) -> Any:
        """Runs a step for the whole batch, and returns what one device would have returned."""

    def during_backward(self) -> AbstractContextManager[Any]:
        """Surrounds Lightning's backward of a step's loss."""
        return record_function("lightning_dp.backward") if is_profiling() else nullcontext()

    def recover_backward(
        self, error: torch.OutOfMemoryError, context: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """Runs the step, in its context, and its backward again after that ran out of memory."""
        raise error

    def to_be_scaled(self, loss: Tensor) -> Tensor:
        """Moves a loss on the CPU to the root device for `GradScaler`.

        GradScaler keeps its scale on the first loss's device. On the CPU it would read `found_inf`,
        which it copies there with `non_blocking=True`, before the copy has ended.
        """
        root = self.engine.devices[0]
        return loss.to(root, non_blocking=True) if loss.device.type == "cpu" else loss


class StepMode(Mode):
    """Runs each step in every replica; its engine, a `StepParallel`, takes the other options."""

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
    def recover_backward(
        self, error: torch.OutOfMemoryError, context: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """Runs the step and its backward again, with fewer samples where memory ran out."""
        call, self._call = self._call, None
        if call is None:
            raise error
        self.engine.rerun(call, self._batch, context, error)


def check_layers_are_registered(root: LightningModule) -> None:
    """Raises a ValueError for layers with parameters that only plain containers hold."""
    known = {*map(id, root.modules())}
    for module in root.modules():
        for name, value in vars(module).items():
            for path, hidden in layers_in(value, name):
                if id(hidden) in known or is_metric(hidden):
                    continue
                if [*hidden.parameters()]:
                    raise ValueError(
                        f"{type(module).__qualname__}.{path}: expected layers to be registered, "
                        f"got {type(hidden).__qualname__} in a plain container: it is neither "
                        "moved nor trained nor saved. Use an nn.ModuleList or an nn.ModuleDict."
                    )


class ForwardMode(Mode):
    """Runs each step once, with the whole batch; a `ForwardParallel` takes the other options."""

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
        with super().during_backward(), self.engine.spreading(), here:
            yield


def _at(module: LightningModule, device: torch.device) -> AbstractContextManager[None]:
    """Sets `self.device` of the module for a while."""
    return replaced(module, **own_device(module, device))


# Which mode


_STEPS: dict[Any, tuple[str, ...]] = {
    TrainerFn.FITTING: ("training_step", "validation_step"),
    TrainerFn.VALIDATING: ("validation_step",),
    TrainerFn.TESTING: ("test_step",),
    TrainerFn.PREDICTING: ("predict_step",),
}


def why_forward_mode(module: LightningModule) -> str:
    """Returns why the Trainer's run needs forward mode, or "".

    Optimizers act once for the whole batch, and an iterator over batches is advanced once, so such
    steps run once, on the main thread. With manual optimisation so do all of the module's steps:
    its validation loss is then computed the same way in every run.
    """
    if not module.automatic_optimization:
        return "it sets automatic_optimization = False"
    for name in _STEPS[module.trainer.state.fn]:
        step = getattr(module, name)
        if step and is_param_in_hook_signature(step, "dataloader_iter", explicit=True):
            return f"its {name} takes dataloader_iter"
    return ""


_BETWEEN_STEPS = (
    *("on_train_batch_start", "on_train_batch_end", "on_before_batch_transfer"),
    *("on_after_batch_transfer", "transfer_batch_to_device", "on_before_backward", "backward"),
    *("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping"),
    *("optimizer_step", "on_before_zero_grad", "optimizer_zero_grad", "lr_scheduler_step"),
)


def has_user_hooks(trainer: Any) -> bool:
    """Whether code of the user's runs between two training steps: it may write to weights.

    A hook of the module, the data module or a callback that is not Lightning's.
    """
    owners = [trainer.lightning_module, getattr(trainer, "datamodule", None), *trainer.callbacks]
    hooks = [getattr(owner, name, None) for owner in owners for name in _BETWEEN_STEPS]
    packages = {getattr(hook, "__module__", "").partition(".")[0] for hook in hooks if hook}
    return not packages <= {"lightning", "pytorch_lightning", "lightning_dp"}
