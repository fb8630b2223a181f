"""Lightning's face of the engine: each hook of the strategy is one call into it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, cast

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_dp.checkpointing import CheckpointMixin
from lightning_dp.first_step import FirstStep, check_first_step
from lightning_dp.layer_sync import replicas_own
from lightning_dp.modes import MODES, ForwardMode, Mode, StepMode, check_mode_options
from lightning_dp.parallel.batch import DeviceUsage, Override, check_overrides
from lightning_dp.parallel.checks import check_choice, check_dim
from lightning_dp.parallel.devices import memory_capacities, resolve_devices, resolve_output_device
from lightning_dp.parallel.gradients import BUFFERS, LOSS_REDUCTIONS
from lightning_dp.parallel.split import CostSplit, OwnSplit, StepUsage, check_split, split_policy
from lightning_dp.parallel.workers import EXECUTORS, current_participant

_CONTEXTS = {
    "training_step": "train_step_context",
    "validation_step": "val_step_context",
    "test_step": "test_step_context",
    "predict_step": "predict_step_context",
}
"""What of the precision plugin surrounds each step."""


class DataParallelMixin(CheckpointMixin):
    """One process, several devices, and the same numbers as on one device.

    Every batch is split over the devices. Each step runs on all of them at once, on replicas of
    the module that are built once and kept; the losses become one loss, the gradients are summed
    into the user's own module on the root device (the first one), where the optimizer lives.
    Outputs, logs and metrics are those of the whole batch.

    Registered as `"dp_custom"`: after `import lightning_dp`, `Trainer(strategy="dp_custom",
    devices=4)` uses the defaults. With one device it is Lightning's single-device strategy.

    Args:
        mode: `"step"`: `training_step` runs in every replica on its shard, which keeps memory
            balanced; `self.all_gather` gives each the whole batch's tensors, and manual
            optimisation acts once for all. `"forward"`: it runs once, with the whole batch on the
            output device, and only `self(x)` is spread over the replicas: exact for losses over
            the whole batch (contrastive, triplet) as they are written.
        devices: the devices, root first, in place of `Trainer(devices=...)`. An entry may repeat
            for several replicas on one device: `["cuda:0", "cuda:0"]`, `["cpu"] * 4`. Integers
            are ids of the machine's accelerator.
        output_device: where loss, logs and gathered outputs end up. None for the root device, a
            name (`"cuda:1"`, `"cpu"`), a `torch.device`, or an integer: a device's id (on the
            CPU, a replica's index).
        split: how samples are shared out. `"even"`: sizes differ by at most one, larger ones
            first, and with fewer samples than devices some are idle. `"chunk"`: the sizes of
            `torch.chunk`, as in `torch.nn.DataParallel`. `"memory"`: learns from the peaks of the
            first steps, and leaves equally much memory free on every device. `"adaptive"`: begins
            even, learns from the times of the steps how fast every device is, and lets all end at
            the same time; what a split has learnt is saved in checkpoints. `"cost"`: samples of
            unequal cost (sequence length, nodes) go where there is least to do; nobody sees the
            other order. Costs are told by the module's method `sample_cost(batch)`, which returns
            a 1-D tensor, or by an entry of the batch, see `sample_cost`. Or a function
            `(batch_size, devices) -> sizes`. Where memory runs out, every split gives the device
            fewer samples, and the step runs again.
        weights: fixed shares, one number of at least 0 per device: `[1, 3, 3, 3]`. Only their
            ratios matter; 0 leaves a device idle. None for equal shares.
        sample_cost: with `split="cost"`, the entry of the batch that holds the samples' costs, such
            as `"lengths"` or `"text.lengths"`; None to ask the module.
        dim: the dimension along which batches are cut and outputs joined.
        gather_overrides: how outputs, and items of lists on `self`, under certain keys are
            gathered, in place of what `gather` does with their type: `{"count": "first",
            "aux.losses": "stack"}`, with "mean", "sum", "stack", "cat", "first" or "list".
        parallel_modules: forward mode: names of submodules whose calls are spread over the
            replicas too, when the step calls them directly: `["generator", "discriminator"]`.
        move_batch: forward mode: whether the batch is brought to the output device before the
            step. False leaves it where the DataLoader put it, which saves a copy of inputs that
            only `self(x)` reads.
        loss_reduction: what the loss of `training_step` is over its samples, `"mean"` or `"sum"`.
            A mean over other things (valid tokens, say) is exact if the step returns
            `{"loss": mean, "num_items": how_many}`, or sets `loss.num_items = how_many`, also
            before a `manual_backward(loss)`.
        buffers: which buffers the module keeps after a training step, running statistics of batch
            norm for instance: those of the `"first"` replica (as in DDP), or the `"mean"` of all,
            weighted by shard size.
        executor: how replicas run: in worker `"threads"`, `"inorder"` on the main thread (for a
            debugger), or `"auto"`, which measures both in the first steps and keeps the faster.
        check_first_step: whether the first training batch is also run on the root alone, to compare
            loss and gradient. If they differ by more than rounding, a warning says which of the
            usual causes it is (a loss that is no mean over samples, batch norm, dropout, something
            random), and what to choose. Leaves no trace; takes a second set of replicas while it
            lasts. The result is `first_step`.
        accelerator: as for every Lightning strategy; the Trainer sets it.
        cluster_environment: as for every Lightning strategy; the Trainer sets it.
        checkpoint_io: as for every Lightning strategy; None for `ModulePrefixCheckpointIO()`.
        precision_plugin: as for every Lightning strategy.

    Raises:
        ValueError: an argument is out of its range; the message says what was expected. What
            depends on the number of devices is checked when the Trainer is made.
    """

    strategy_name = "dp_custom"
    package: ClassVar[str]
    """The package whose Trainer it is for."""

    def __init__(
        self,
        *,
        mode: Literal["step", "forward"] = "step",
        devices: Sequence[int | str | torch.device] | None = None,
        output_device: int | str | torch.device | None = None,
        split: str | OwnSplit = "even",
        weights: Sequence[float] | None = None,
        sample_cost: str | None = None,
        dim: int = 0,
        gather_overrides: Mapping[str, Override] | None = None,
        parallel_modules: Sequence[str] = (),
        move_batch: bool = True,
        loss_reduction: Literal["mean", "sum"] = "mean",
        buffers: Literal["first", "mean"] = "first",
        executor: Literal["auto", "threads", "inorder"] = "auto",
        check_first_step: bool = False,
        accelerator: Accelerator | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        check_choice("mode", mode, MODES)
        check_split(split, weights, sample_cost)
        check_dim(dim)
        check_overrides(gather_overrides)
        check_choice("loss_reduction", loss_reduction, LOSS_REDUCTIONS)
        check_choice("buffers", buffers, BUFFERS)
        check_choice("executor", executor, EXECUTORS)
        check_choice("check_first_step", check_first_step, (False, True))
        check_mode_options(mode, parallel_modules, move_batch)
        self._mode_name = mode
        self._output_device = output_device
        self._weights = weights
        self._split = split
        self._engine_options: dict[str, Any] = {
            "dim": dim,
            "cost_key": sample_cost,
            "overrides": gather_overrides,
            "buffers": buffers,
            "executor": executor,
        }
        self._step_options: dict[str, Any] = {"loss_reduction": loss_reduction}
        self._forward_options: dict[str, Any] = {
            "parallel_modules": parallel_modules,
            "move_batch": move_batch,
        }
        self._check_first_step = check_first_step
        self._first_step: FirstStep | None = None
        self._mode: Mode | None = None
        self._last_sizes: tuple[int, ...] = ()
        self._usage: list[DeviceUsage] = []
        super().__init__(
            accelerator=accelerator,
            parallel_devices=None if devices is None else resolve_devices(devices),
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )

    # Devices

    @property
    @override
    def parallel_devices(self) -> list[torch.device] | None:
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, parallel_devices: list[torch.device] | None) -> None:
        """Takes the devices, ours or the Trainer's, and checks what depends on them."""
        self._parallel_devices = parallel_devices
        if parallel_devices:
            self.split_policy = split_policy(
                self._split,
                self._weights,
                parallel_devices,
                partial(memory_capacities, parallel_devices),
            )
            self._resolved_output = resolve_output_device(self._output_device, parallel_devices)

    @property
    @override
    def root_device(self) -> torch.device:
        if not self.parallel_devices:
            raise RuntimeError(
                "Expected the strategy to be used in a Trainer, which gives it its devices, or "
                "DataParallelStrategy(devices=[...])."
            )
        return self.parallel_devices[0]

    @property
    def output_device(self) -> torch.device:
        """Where loss, logs and gathered outputs end up."""
        return self._resolved_output

    @property
    def last_sizes(self) -> tuple[int, ...]:
        """Samples per device in the latest step."""
        return self._last_sizes

    @property
    def first_step(self) -> FirstStep | None:
        """What `check_first_step` has found in the latest fit; None if it has not looked yet."""
        return self._first_step

    @property
    def usage(self) -> list[DeviceUsage]:
        """What every device did in the training steps of the latest fit."""
        return self._usage

    def watch(self) -> None:
        """Measures every training step of this fit from now on, for `measured_steps`."""
        if self._mode is not None:
            self._mode.engine.meter.watch()

    def measured_steps(self, *, wait: bool = False) -> list[StepUsage]:
        """Takes the training steps measured since the last call, in order, each of them once.

        Empty with one device, after the fit, and if nothing is watched: see `watch`. In forward
        mode each spread call of the module is a step.

        Args:
            wait: whether to wait for GPUs to be through with all steps; else those that they are
                still at are in a later call.
        """
        return [] if self._mode is None else self._mode.engine.meter.take(wait=wait)

    # Setting up and tearing down

    @override
    def model_to_device(self) -> None:
        cast(LightningModule, self.model).to(self.root_device)

    @override
    def setup(self, trainer: Trainer) -> None:
        devices = cast(list[torch.device], self.parallel_devices)
        super().setup(trainer)
        if len(devices) == 1:
            return  # every hook is then the base class's: plain Lightning on one device
        if self._layer_sync is not None:
            self._layer_sync = replicas_own(self._layer_sync)
            self._layer_sync.apply(cast(LightningModule, self.lightning_module))
        self._mode = self._new_mode()
        profiler = cast(Any, trainer).profiler
        if type(profiler).__name__ == "SimpleProfiler":  # others see what torch.profiler sees
            self._mode.engine.ranges.profile = profiler.profile
        if trainer.state.fn == TrainerFn.FITTING:
            self._usage = self._mode.engine.meter.usage
            self._first_step = None

    def _new_mode(self, **others: Any) -> Mode:
        """Makes the mode that the options ask for, but for some others."""
        module = cast(LightningModule, self.lightning_module)
        devices = cast(list[torch.device], self.parallel_devices)
        options = {
            "transfer": super().batch_to_device,
            "output_device": self.output_device,
            "split": self.split_policy,
            **self._engine_options,
            **others,
        }
        if self._mode_name == "step":
            return StepMode(module, devices, **options, **self._step_options)
        return ForwardMode(module, devices, **options, **self._forward_options)

    @override
    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        super().load_model_state_dict(checkpoint, strict=strict)
        self._resync()

    # Ends

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._close()

    @override
    def teardown(self) -> None:
        self._close()
        if self._layer_sync is not None and self.lightning_module is not None:
            self._layer_sync.revert(self.lightning_module)
        super().teardown()

    # Steps

    @override
    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        """Does what the mode says; to another device, as asked for explicitly, it moves."""
        if self._mode is None or device is not None:
            return super().batch_to_device(batch, device, dataloader_idx)
        return self._mode.batch(batch, dataloader_idx)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step("training_step", super().training_step, args, kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step("validation_step", super().validation_step, args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step("test_step", super().test_step, args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step("predict_step", super().predict_step, args, kwargs)

    @override
    def backward(self, *args: Any, **kwargs: Any) -> Any:
        mode = self._mode
        if mode is None:
            return super().backward(*args, **kwargs)
        with mode.during_backward():
            try:
                return super().backward(*args, **kwargs)
            except torch.OutOfMemoryError as error:
                mode.recover_backward(error, self.precision_plugin.train_step_context)
        return self._end_backward(*args)

    def _end_backward(self, closure_loss: torch.Tensor, *_: Any) -> torch.Tensor:
        """What Lightning would have done after a backward that did not end at once."""
        module = cast(LightningModule, self.lightning_module)
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    @override
    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], *args: Any, **kwargs: Any
    ) -> Any:
        mode = self._mode
        if mode is None:
            return super().optimizer_step(optimizer, closure, *args, **kwargs)

        def with_all_gradients() -> Any:
            result = closure()
            # Of a training step that returned None, no backward has come.
            mode.engine.backward.reduce_waiting()
            return result

        return super().optimizer_step(optimizer, with_all_gradients, *args, **kwargs)

    @contextlib.contextmanager
    @override
    def block_backward_sync(self) -> Iterator[None]:
        """While it lasts, gradients accumulate on the replicas; the next backward sums them all."""
        # Not where a replica says so: there every backward is a joint one.
        mode = None if current_participant() else self._mode
        if mode is not None:
            mode.engine.backward.accumulating = True
        try:
            yield
        finally:
            if mode is not None:
                mode.engine.backward.accumulating = False

    # Callbacks may write weights in ways that leave no trace, and they do it at these times.

    @override
    def on_train_start(self) -> None:
        self._resync()

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self._resync()

    @override
    def on_validation_end(self) -> None:
        self._resync()

    def _step(
        self,
        method: str,
        on_one_device: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if self._mode is None:
            return on_one_device(*args, **kwargs)
        batch, *rest = (*args, *kwargs.values())
        if method != "training_step" and rest[:1] in ([], [0]):
            self._mode.engine.resync()
        if method == "training_step" and self._check_first_step and self._first_step is None:
            self._compare_first_step(self._mode, batch, tuple(rest))
        with getattr(self.precision_plugin, _CONTEXTS[method])():
            output = self._mode.step(method, batch, tuple(rest))
        self._last_sizes = self._mode.engine.last_sizes
        return output

    def _compare_first_step(self, mode: Mode, batch: Any, args: tuple[Any, ...]) -> None:
        # A split that learns would learn from the check's steps.
        policy = self.split_policy
        split = policy if isinstance(policy, CostSplit) else lambda n: policy(n)
        with mode.engine.meter.unmeasured():
            self._first_step = check_first_step(
                cast(LightningModule, self.lightning_module),
                batch,
                args,
                make_mode=partial(self._new_mode, split=split, executor="inorder"),
                loss_reduction=self._step_options["loss_reduction"],
                transfer=super().batch_to_device,
                precision=self.precision_plugin,
                devices=[*mode.engine.devices, mode.engine.output_device],
            )
        mode.engine.resync()
        self._first_step.tell()

    def _resync(self) -> None:
        if self._mode is not None:
            self._mode.engine.resync()

    def _close(self) -> None:
        if self._mode is not None:
            self._mode.engine.close()
        self._mode = None

    def __repr__(self) -> str:
        """What Lightning shows when it refuses a strategy, that of the other package perhaps."""
        name, other = type(self).__qualname__, "lightning"
        twin = "lightning_dp.DataParallelStrategy"
        if self.package == other:
            other, twin = "pytorch_lightning", "lightning_dp.pytorch_lightning.DataParallelStrategy"
        return f"<{name} for a Trainer of {self.package}; one of {other} takes {twin}>"

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        if cls.strategy_name not in strategy_registry:
            strategy_registry.register(
                cls.strategy_name, cls, description="Data parallelism in one process"
            )


class DataParallelStrategy(DataParallelMixin, ParallelStrategy):  # noqa: D101
    __doc__ = DataParallelMixin.__doc__

    package = "lightning"
