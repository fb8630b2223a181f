"""The strategy: its options, and Lightning's hooks, each of which is one call into a mode's engine.

A mode runs the batches and steps of the loop, see `modes`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, Literal, cast

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from lightning_dp.auto_split import AutoMode
from lightning_dp.checkpointing import CheckpointMixin
from lightning_dp.data_parallel import check_engine_options
from lightning_dp.first_step import Report
from lightning_dp.first_step.lightning_step import FirstSteps
from lightning_dp.layer_sync import replicas_own
from lightning_dp.lightning_private import devices_asked_for, layer_sync, set_layer_sync
from lightning_dp.modes import ForwardMode, Mode, StepMode, has_user_hooks, why_forward_mode
from lightning_dp.parallel.checks import check_choice, check_names, expected
from lightning_dp.parallel.devices import memory_capacities, resolve_devices, resolve_output_device
from lightning_dp.parallel.gather import Override, without_rows
from lightning_dp.parallel.split import (
    Auto,
    OwnSplit,
    SplitPolicy,
    StepUsage,
    check_split,
    split_policy,
)
from lightning_dp.parallel.step import LOSS_REDUCTIONS
from lightning_dp.parallel.usage import DeviceUsage
from lightning_dp.processes import check_timeout


class DataParallelMixin(CheckpointMixin):
    """One process, several devices, and the same numbers as on one device.

    Every batch is split over the devices. Each step runs on all of them at once, on replicas of
    the module that are built once and kept; the losses become one loss, the gradients are summed
    into the user's own module on the root device (the first one), where the optimizer lives.
    Outputs, logs and metrics are those of the whole batch.

    Registered as `"dp_custom"`: after `import lightning_dp`, `Trainer(strategy="dp_custom",
    devices=4)` uses the defaults, and `"dp_custom_forward"` those of forward mode. With one device
    it is Lightning's single-device strategy.

    Args:
        mode: `"step"`: `training_step` runs in every replica on its shard, which keeps memory
            balanced; `self.all_gather` gives each the whole batch's tensors. `"forward"`: it runs
            once, with the whole batch on the output device, and only `self(x)` is spread over the
            replicas: exact for losses over the whole batch (contrastive, triplet) as they are
            written; in one process only. A 0-dim float that `forward` returns is a mean over its
            samples. Modules with `automatic_optimization = False`, and with steps that take
            `dataloader_iter`, always train in forward mode; a line at INFO says so.
        devices: the devices, root first, in place of `Trainer(devices=...)`. An entry may repeat
            for several replicas on one device: `["cuda:0", "cuda:0"]`, `["cpu"] * 4`. Integers
            are ids of the machine's accelerator. Several processes on a machine share its devices
            out, in order.
        output_device: where loss, logs and gathered outputs end up. None for the root device, a
            name (`"cuda:1"`, `"cpu"`), a `torch.device`, or an integer: a device's id (on the
            CPU, a replica's index).
        split: how samples are shared out. `"even"`: sizes differ by at most one. `"auto"`: as
            `"adaptive"`, on as many devices as make a step shortest; with
            `Trainer(deterministic=True)`, and in several processes, on all of them. `"chunk"`: the
            sizes of `torch.chunk`, as in `torch.nn.DataParallel`. `"memory"`: leaves equally much
            memory free on every device, by the peaks of the first steps. `"adaptive"`: lets all
            devices end at the same time, by the times of the steps. `"cost"`: samples of unequal
            cost (sequence length, nodes) in shards of about the same cost; costs come from the
            module's method `sample_cost(batch)`, which returns a 1-D tensor, or from an entry of
            the batch, see `sample_cost`. Or a function `(batch_size, devices) -> sizes`. Where
            memory runs out, every split gives the device fewer samples, and the step runs again.
            Each process gets a share in proportion to its number of devices.
        weights: fixed shares, one number of at least 0 per device of the machine: `[1, 3, 3, 3]`.
            Only their ratios matter, also between machines. 0 leaves a device idle; each process
            needs one above 0. `split="adaptive"` begins with them. None for equal shares.
        sample_cost: with `split="cost"`, the entry of the batch that holds the samples' costs, such
            as `"lengths"` or `"text.lengths"`; None to ask the module.
        dim: the dimension along which batches are cut and outputs joined.
        gather_overrides: how outputs, and items of lists on `self`, under certain keys are
            gathered, in place of what `gather` does with their type: `{"count": "first",
            "aux.losses": "stack"}`, with "mean", "sum", "stack", "cat", "first", "list",
            `lightning_dp.pad(value)`, or a function of the list of the replicas' values.
        parallel_modules: forward mode: names of submodules whose calls are spread over the
            replicas too, when the step calls them directly: `["generator", "discriminator"]`.
        move_batch: forward mode: whether the batch is brought to the output device before the
            step. False leaves it where the DataLoader put it, which saves a copy of inputs that
            only `self(x)` reads.
        loss_reduction: what the loss of `training_step` is over its samples, `"mean"` or `"sum"`.
            A mean over other things (valid tokens, say) is exact if the step returns
            `{"loss": mean, "num_items": how_many}`, or sets `loss.num_items = how_many`.
        buffers: which buffers the module keeps after a training step, running statistics of batch
            norm for instance: those of the `"first"` replica (as in DDP), or the `"mean"` of all,
            weighted by shard size.
        executor: how replicas run: in worker `"threads"`, `"inorder"` on the main thread (for a
            debugger), or `"auto"`, which measures both in the first steps and keeps the faster.
        check_first_step: whether the first step of each kind (training, validation, test, predict)
            also runs on a few samples of its batch, once on the root alone and once split. A
            difference in loss, gradients, logs, outputs, lists or buffers is one warning that names
            the cause and what to write instead. Everything is put back but files, environments,
            globals and the data module: a step that changes these needs `False`. `"auto"` leaves
            it out under `fast_dev_run`, for modules with compiled parts or more than 4 GiB of
            tensors, and where state cannot be put back.
        process_group_backend: with several processes, what moves bytes between them:
            `"gloo"`, `"nccl"` or `"cpu:gloo,cuda:nccl"`. None for gloo on CPUs, and for both on
            GPUs.
        timeout: how long a replica waits in a collective for one that does not come, and a process
            for the others: seconds, or a `timedelta`. None for half an hour, or torch's default.
        accelerator: as for every Lightning strategy; the Trainer sets it.
        cluster_environment: as for every Lightning strategy; the Trainer sets it.
        checkpoint_io: as for every Lightning strategy; None for `ModulePrefixCheckpointIO()`.
        precision_plugin: as for every Lightning strategy.

    Raises:
        ValueError: an argument is out of its range; the message says the range. What
            depends on the number of devices is checked when the Trainer is made.
    """

    strategy_name = "dp_custom"
    package: ClassVar[str]
    """The package whose Trainer it is for."""
    first_step: Mapping[str, Report] = MappingProxyType({})
    """What `check_first_step` has found in the latest run, by the name of the step."""
    last_sizes: tuple[int, ...] = ()
    """Samples per device in the latest step."""
    usage: Sequence[DeviceUsage] = ()
    """What every device did in the training steps of the latest fit."""

    # While a Trainer runs:
    _mode: Mode | None = None  # on several devices
    _first_steps: FirstSteps | None = None

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
        check_first_step: bool | Literal["auto"] = "auto",
        process_group_backend: str | None = None,
        timeout: timedelta | float | None = None,
        accelerator: Accelerator | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        self._options_of_all = {n: value for n, value in locals().items() if n in _OF_ALL}
        check_split(split, weights, sample_cost)
        check_engine_options(dim, buffers, executor, gather_overrides)
        check_choice("check_first_step", check_first_step, ("auto", True, False))
        check_choice("mode", mode, ("step", "forward"))
        check_choice("loss_reduction", loss_reduction, LOSS_REDUCTIONS)
        check_names("parallel_modules", parallel_modules)
        check_choice("move_batch", move_batch, (True, False))
        forward_options: dict[str, Any] = {
            "parallel_modules": parallel_modules,
            "move_batch": move_batch,
        }
        if mode == "step" and (parallel_modules or not move_batch):
            key = "parallel_modules" if parallel_modules else "move_batch"
            hint = 'Use mode="forward", in which it has a meaning.'
            raise expected(key, "to be left out in step mode", forward_options[key], hint)
        backends = (None, "gloo", "nccl", "cpu:gloo,cuda:nccl")
        check_choice("process_group_backend", process_group_backend, backends)
        self._process_group_backend, self._timeout = process_group_backend, check_timeout(timeout)
        self._engine_options: dict[str, Any] = {
            "dim": dim,
            "cost_key": sample_cost,
            "overrides": gather_overrides,
            "buffers": buffers,
            "executor": executor,
            "timeout": self._timeout,
        }
        self._forward_options, self._loss_reduction = forward_options, loss_reduction
        self._split, self._weights = split, weights
        self._mode_name, self._output_device = mode, output_device
        self._has_own_devices = devices is not None
        self._check_first_step: bool | Literal["auto"] = check_first_step
        super().__init__(
            accelerator=accelerator,
            parallel_devices=None if devices is None else resolve_devices(devices),
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )

    __init__.__qualname__ = "DataParallelStrategy.__init__"  # as Python names it in a TypeError

    def __getstate__(self) -> dict[str, Any]:
        """Replicas and threads stay behind: a copy is as between two fits, until it is set up."""
        return {**super().__getstate__(), "_mode": None, "_first_steps": None}

    def __repr__(self) -> str:
        """With the package: the other package's Trainer refuses the strategy by this text."""
        options = f"mode={self._mode_name!r}, split={self._split!r}"
        return f"<{type(self).__qualname__}({options}) for a Trainer of {self.package}>"

    # Devices, and how samples are shared out

    @property
    @override
    def parallel_devices(self) -> list[torch.device] | None:
        return self._devices

    @parallel_devices.setter
    def parallel_devices(self, parallel_devices: list[torch.device] | None) -> None:
        """Takes the machine's devices, ours or the Trainer's."""
        self.machine_devices = parallel_devices
        self.take_devices(slice(None))

    @override
    def take_devices(self, own: slice) -> None:
        """Keeps these of the machine's devices, and checks what depends on them."""
        devices = self._devices = self.machine_devices and self.machine_devices[own]
        weights = self._own_weights = None if self._weights is None else self._weights[own]
        self.share = float(sum(weights or [1] * len(devices or ())))
        self._split_policy: SplitPolicy | None = None
        if devices:
            if self._split != "memory":  # which asks devices, that may be another process's
                self._split_policy = self._new_policy()
            self._resolved_output = resolve_output_device(self._output_device, devices)

    def _new_policy(self) -> SplitPolicy:
        devices = self._devices or []
        # Only "memory" needs devices that count it: others take 0 for "no limit is known".
        capacities = partial(memory_capacities, devices, must_count=self._split == "memory")
        return split_policy(self._split, self._own_weights, devices, capacities)

    @property
    @override
    def root_device(self) -> torch.device:
        if not self._devices:
            raise RuntimeError(
                "Expected the strategy to be used in a Trainer, which gives it its devices, or "
                "DataParallelStrategy(devices=[...])."
            )
        return self._devices[0]

    @property
    def output_device(self) -> torch.device:
        """Where loss, logs and gathered outputs end up."""
        return self._resolved_output

    # Setting up and tearing down

    @override
    def model_to_device(self) -> None:
        self._module.to(self.root_device)

    @property
    def _module(self) -> LightningModule:
        return cast(LightningModule, self.lightning_module)

    @override
    def setup(self, trainer: Trainer) -> None:
        asked, own = devices_asked_for(trainer), self.machine_devices or []
        if self._has_own_devices and asked not in (None, len(own)):
            raise ValueError(
                f"devices: expected as many as Trainer(devices=...) names, {asked}, got "
                f"{[*map(str, own)]}. Leave out one of the two: the strategy's devices are taken "
                "in place of the Trainer's."
            )
        self._close()  # what an interrupted end of an earlier run has left
        super().setup(trainer)
        plugin, why = layer_sync(self), why_forward_mode(self._module)
        if self.world is not None:
            self._check_processes(why, synced=plugin is not None)
            self.begin_together(self.world, self._options_of_all)
        elif len(self._devices or ()) == 1:
            return  # every hook is then the base class's: plain Lightning on one device
        if plugin is not None:
            set_layer_sync(self, replicas_own(plugin))
            layer_sync(self).apply(self._module)
        if why and self._mode_name == "step":
            rank_zero_info(f"{type(self._module).__name__} runs in forward mode, as {why}.")
        self.first_step = reports = dict[str, Report]()
        if self._check_first_step:
            self._first_steps = FirstSteps(
                reports,
                self._check_first_step,
                trainer,
                self._new_mode,
                super().batch_to_device,
            )
        self._mode = self._new_mode()
        if self.world is None and isinstance(self._split_policy, Auto):
            to_check = self._first_steps.due if self._first_steps else ()
            self._mode = AutoMode(self._mode, self._split_policy, trainer, to_check)
        if trainer.state.fn == TrainerFn.FITTING:
            self.usage = self._mode.engine.usage

    def _check_processes(self, why_forward: str, *, synced: bool) -> None:
        """Refuses what looks at the whole batch: a step of several processes sees its own part."""
        if why_forward or self._mode_name == "forward":
            why = f", as {why_forward}" if why_forward else ""
            refused = f"mode: expected step mode in several processes, got forward mode{why}"
        elif synced:
            refused = "sync_batchnorm: expected False in several processes, got True"
        else:
            return
        raise ValueError(
            f"{refused}. Leave it out, or start one process, which can have all devices of the "
            "machine, or use Lightning's strategy='ddp'."
        )

    def _new_mode(self, **others: Any) -> Mode:
        """Makes the mode that this run needs, with some of its engine's options replaced."""
        if self._split_policy is None:
            self._split_policy = self._new_policy()
        options: dict[str, Any] = {
            **self._engine_options,
            "transfer": super().batch_to_device,
            "output_device": self.output_device,
            "split": self._split_policy,
            "world": self.world,
            **others,
        }
        devices = self._devices or []
        mode: Mode
        if self._mode_name == "forward" or why_forward_mode(self._module):
            mode = ForwardMode(self._module, devices, **self._forward_options, **options)
        else:
            mode = StepMode(self._module, devices, loss_reduction=self._loss_reduction, **options)
        trainer = self._module.trainer
        mode.engine.executor.is_terminated = lambda: trainer.received_sigterm
        return mode

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._close()
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        self._close()
        if layer_sync(self) is not None and self.lightning_module is not None:
            layer_sync(self).revert(self.lightning_module)
        super().teardown()

    def _close(self) -> None:
        if self._mode is not None:
            self._mode.engine.close()
        self._mode = self._first_steps = None

    # Steps

    @override
    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        """Does what the mode does with a batch; with a device, moves it there as Lightning does."""
        if self._mode is None or device is not None:
            return super().batch_to_device(batch, device, dataloader_idx)
        return self._mode.batch(batch, dataloader_idx)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step("training_step", *args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step("validation_step", *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step("test_step", *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        output = self._step("predict_step", *args, **kwargs)
        is_empty = self.world is not None and self.world.is_idle  # this rank's slice of the batch
        return without_rows(output, 0, sum(self.last_sizes)) if is_empty else output

    def _step(self, method: str, *args: Any, **kwargs: Any) -> Any:
        mode, checks = self._mode, self._first_steps
        if mode is None:
            return getattr(super(), method)(*args, **kwargs)
        batch, *rest = (*args, *kwargs.values())
        # Before a first batch callbacks may swap weights; without batch_idx any may be the first.
        if method != "training_step" and rest[:1] in ([], [0]):
            mode.engine.resync()
        if checks is not None and method in checks.due:
            checks.check(mode, method, batch, tuple(rest), self.world)
        name = method.replace("training", "train").replace("validation", "val")
        with getattr(self.precision_plugin, f"{name}_context")():
            output = mode.step(method, batch, tuple(rest))
        self.last_sizes = mode.engine.last_sizes
        return output

    @override
    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        mode = self._mode
        if mode is None:
            return super().backward(closure_loss, *args, **kwargs)
        plugin = self.precision_plugin
        if getattr(plugin, "scaler", None) is not None:
            closure_loss = mode.to_be_scaled(closure_loss)
        with mode.during_backward():
            try:
                return super().backward(closure_loss, *args, **kwargs)
            except torch.OutOfMemoryError as error:
                mode.recover_backward(error, plugin.train_step_context)
        # The error has skipped the rest of Lightning's backward, which follows here.
        closure_loss = plugin.post_backward(closure_loss, self._module)
        self.post_backward(closure_loss)
        return closure_loss

    # Callbacks may write weights in ways that leave no trace, and they do it at these times.

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if batch_idx == 0:
            self._resync()
            if self._mode is not None:
                self._mode.engine.frozen_may_change = has_user_hooks(self._module.trainer)

    @override
    def on_validation_end(self) -> None:
        super().on_validation_end()
        self._resync()

    def _resync(self) -> None:
        if self._mode is not None:
            self._mode.engine.resync()

    # What monitors and callbacks read

    def watch(self) -> None:
        """Measures every training step of this fit from now on, for `measured_steps`."""
        if self._mode is not None:
            self._mode.engine.meter.is_watched = True

    def measured_steps(self, *, wait: bool = False) -> list[StepUsage]:
        """Takes the training steps measured since the last call, in order, each of them once.

        Empty with one device, after the fit, and if nothing is watched. In forward mode each spread
        call of the module is a step. Of several processes each sees its own devices.

        Args:
            wait: whether to wait for GPUs; else steps that they are still at are in a later call.
        """
        return [] if self._mode is None else self._mode.engine.meter.take(wait=wait)

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        text = "Data parallelism in one process"
        if cls.strategy_name not in strategy_registry:
            strategy_registry.register(cls.strategy_name, cls, text)
            name, text = f"{cls.strategy_name}_forward", f"{text}: forward mode"
            strategy_registry.register(name, cls, text, mode="forward")


_OF_ALL = (
    *("mode", "split", "sample_cost", "dim", "gather_overrides", "parallel_modules"),
    *("move_batch", "loss_reduction", "buffers"),
)
"""Those that all processes share."""


class DataParallelStrategy(DataParallelMixin, ParallelStrategy):  # noqa: D101  # it is `__doc__`
    __doc__ = DataParallelMixin.__doc__

    package = "lightning"
