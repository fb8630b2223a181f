"""The options of the strategy: what they mean, their checks, and the mode that they ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, cast

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch import LightningModule
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from typing_extensions import override

from lightning_dp.checkpointing import CheckpointMixin
from lightning_dp.forward_mode import ForwardMode
from lightning_dp.mode import Mode, needs_forward_mode
from lightning_dp.parallel.checks import check_choice, check_names, named_options
from lightning_dp.parallel.data_parallel import check_engine_options
from lightning_dp.parallel.devices import memory_capacities, resolve_devices, resolve_output_device
from lightning_dp.parallel.gather import Override
from lightning_dp.parallel.reduce import LOSS_REDUCTIONS
from lightning_dp.parallel.scatter import no_costs
from lightning_dp.parallel.split import (
    OwnSplit,
    SplitPolicy,
    check_split,
    split_policy,
)
from lightning_dp.processes import Rule, check_group_options
from lightning_dp.step_mode import StepMode


class OptionsMixin(CheckpointMixin):
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
            written. A 0-dim float that `forward` returns, a loss say, is a mean over its samples.
            Modules with `automatic_optimization = False`, and with steps that take
            `dataloader_iter`, always train in forward mode; a line at INFO says so.
        devices: the devices, root first, in place of `Trainer(devices=...)`. An entry may repeat
            for several replicas on one device: `["cuda:0", "cuda:0"]`, `["cpu"] * 4`. Integers
            are ids of the machine's accelerator. Several processes on a machine share its devices
            out, in order.
        output_device: where loss, logs and gathered outputs end up. None for the root device, a
            name (`"cuda:1"`, `"cpu"`), a `torch.device`, or an integer: a device's id (on the
            CPU, a replica's index). Not a device of another process.
        split: how samples are shared out. `"even"`: sizes differ by at most one, larger ones
            first, and with fewer samples than devices some are idle. `"auto"`: as `"adaptive"`, on
            as many devices as make a step shortest; where the root alone is fastest, it does the
            step as Lightning itself would. It goes by times: two runs may differ by rounding, but
            with `Trainer(deterministic=True)` it is `"even"`. `"chunk"`: the sizes of
            `torch.chunk`, as in `torch.nn.DataParallel`. `"memory"`: learns from the peaks of the
            first steps, and leaves equally much memory free on every device. `"adaptive"`: begins
            even, learns from the times of the steps how fast every device is, and lets all end at
            the same time. What they learn is of one fit: it goes into no checkpoint. `"cost"`:
            samples of unequal cost (sequence length, nodes) go where there is least to do, and
            results are in the batch's order. Costs come from the module's method
            `sample_cost(batch)`, which returns a 1-D tensor, or by an entry of the batch, see
            `sample_cost`. Or a function
            `(batch_size, devices) -> sizes`. Where memory runs out, every split gives the device
            fewer samples, and the step runs again. Between processes shares are as the numbers of
            devices; `"chunk"` goes by all devices of all processes.
        weights: fixed shares, one number of at least 0 per device of the machine: `[1, 3, 3, 3]`.
            Only their ratios matter, between machines too; 0 leaves a device idle. With
            `split="adaptive"`, the shares that it begins with. None for equal shares.
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
            `{"loss": mean, "num_items": how_many}`, or sets `loss.num_items = how_many`.
        buffers: which buffers the module keeps after a training step, running statistics of batch
            norm for instance: those of the `"first"` replica (as in DDP), or the `"mean"` of all,
            weighted by shard size.
        executor: how replicas run: in worker `"threads"`, `"inorder"` on the main thread (for a
            debugger), or `"auto"`, which measures both in the first steps and keeps the faster.
        check_first_step: whether the first step of each kind (training, validation, test, predict)
            also runs on a few samples of its batch, once on the root alone and once split, to
            compare loss, gradients, logged values, outputs, items of lists and buffers. Everything
            is put back: gradients, buffers, random state, metrics, logs, and lists and attributes
            of the module and of the user's objects on it. Files, environments, classes, global
            numbers and the Trainer's data module cannot be: a step that changes them needs `False`.
            A difference beyond rounding is one warning that names what differs, the cause (a sum, a
            mean over something else than samples, a loss over the whole batch, a logged value that
            is no mean) and what to write instead; batch norm without sync and random numbers are
            one line at INFO. `"auto"` leaves it out under `fast_dev_run`, for modules with compiled
            parts or more than 4 GiB of tensors, and where state cannot be put back. What was found
            is `first_step`, by the name of the step.
        process_group_backend: with several processes, what moves bytes between them:
            `"gloo"`, `"nccl"` or `"cpu:gloo,cuda:nccl"`. None for gloo on CPUs, and for both on
            GPUs.
        timeout: how long a replica waits in a collective for one that does not come, and a process
            for the others: a number of seconds, or a `timedelta`. None for half an hour, or for
            torch's default between processes.
        accelerator: as for every Lightning strategy; the Trainer sets it.
        cluster_environment: as for every Lightning strategy; the Trainer sets it.
        checkpoint_io: as for every Lightning strategy; None for `ModulePrefixCheckpointIO()`.
        precision_plugin: as for every Lightning strategy.

    Raises:
        ValueError: an argument is out of its range; the message says what was expected. What
            depends on the number of devices is checked when the Trainer is made.
    """

    given_options: Mapping[str, str] = MappingProxyType({})
    """The options that differ from their defaults, as text."""

    @named_options
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
        self.options_of_all = {n: value for n, value in locals().items() if n in _OF_ALL}
        check_split(split, weights, sample_cost)
        check_engine_options(dim, buffers, executor, gather_overrides)
        check_choice("check_first_step", check_first_step, ("auto", True, False))
        check_choice("mode", mode, ("step", "forward"))
        check_choice("loss_reduction", loss_reduction, LOSS_REDUCTIONS)
        _check_forward_options(mode, parallel_modules, move_batch)
        self._engine_options: dict[str, Any] = {
            "dim": dim,
            "cost_key": sample_cost,
            "overrides": gather_overrides,
            "buffers": buffers,
            "executor": executor,
            "loss_reduction": loss_reduction,
        }
        self._forward_options: dict[str, Any] = {
            "parallel_modules": parallel_modules,
            "move_batch": move_batch,
        }
        self._process_group_backend = process_group_backend
        self._timeout = check_group_options(process_group_backend, timeout)
        self._split, self._weights = split, weights
        self._cost_key, self._mode_name = sample_cost, mode
        self._output_device = output_device
        self._loss_reduction = loss_reduction
        self._check_first_step: bool | Literal["auto"] = check_first_step
        super().__init__(
            accelerator=accelerator,
            parallel_devices=None if devices is None else resolve_devices(devices),
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )

    @property
    @override
    def parallel_devices(self) -> list[torch.device] | None:
        return self._devices

    @parallel_devices.setter
    def parallel_devices(self, parallel_devices: list[torch.device] | None) -> None:
        """Takes the machine's devices, ours or the Trainer's, and checks what depends on them.

        Where several processes share them out, `take_devices` comes next.
        """
        self.machine_devices = self._devices = parallel_devices
        self._own_weights = self._weights
        self._split_policy: SplitPolicy | None = None
        if parallel_devices:
            if self._split != "memory":  # which asks devices, that may be another process's
                self._split_policy = self._new_policy()
            self._resolved_output = resolve_output_device(self._output_device, parallel_devices)

    @override
    def take_devices(self, own: slice) -> None:
        machine = self.machine_devices or []
        self._devices = machine[own]
        self._own_weights = None if self._weights is None else self._weights[own]
        self._split_policy = self._new_policy()
        self._resolved_output = resolve_output_device(self._output_device, self._devices)
        others = {*machine} - {*self._devices}
        if self._resolved_output in others:
            raise ValueError(
                "output_device: expected None, 'cpu' or one of this process's own devices "
                f"{list(map(str, self._devices))}, got {self._output_device!r}, which is another "
                "process's. Leave it out for each process's root device."
            )

    @property
    def split_policy(self) -> SplitPolicy:
        """How many samples each of this process's devices gets."""
        if self._split_policy is None:
            self._split_policy = self._new_policy()
        return self._split_policy

    @split_policy.setter
    def split_policy(self, split_policy: SplitPolicy) -> None:
        self._split_policy = split_policy

    def _new_policy(self) -> SplitPolicy:
        devices, weights = self._devices or [], self._own_weights
        if weights is not None and len(devices) == len(weights) and not any(weights):
            weights = None  # the other processes have all samples; of theirs one is worked on here
        # Only "memory" needs devices that count it: others take 0 for "no limit is known".
        capacities = partial(memory_capacities, devices, must_count=self._split == "memory")
        return split_policy(self._split, weights, devices, capacities)

    def check_costs(self, module: nn.Module) -> None:
        """Raises a ValueError if no method or option gives the costs by which batches are split.

        In forward mode each module whose call is spread may give them, also one made later.
        """
        is_told = self._cost_key is not None or hasattr(module, "sample_cost")
        is_split = self._split == "cost" and len(self.machine_devices or ()) > 1
        if is_split and not is_told and self._mode_name == "step":
            raise no_costs(module)

    @property
    @override
    def share(self) -> tuple[int, tuple[float, ...] | None, Rule]:
        weights = None if self._own_weights is None else tuple(self._own_weights)
        rule: Rule = "chunk" if self._split == "chunk" else "even"
        return len(self._devices or ()), weights, rule

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

    def _new_mode(self, **others: Any) -> Mode:
        """Makes the mode that this run needs, with some of its engine's options replaced."""
        module = cast(LightningModule, self.lightning_module)
        options: dict[str, Any] = {
            **self._engine_options,
            "transfer": super().batch_to_device,
            "output_device": self.output_device,
            "split": self.split_policy,
            "world": self._world,
            "timeout": self._timeout,
            **others,
        }
        if self._mode_name == "forward" or self._why_forward(module):
            return ForwardMode(module, self._devices or [], **self._forward_options, **options)
        return StepMode(module, self._devices or [], **options)

    def _why_forward(self, module: LightningModule) -> str:
        """Why this run needs forward mode though step mode was asked for, or ""."""
        stage = module.trainer.state.fn
        return needs_forward_mode(module, _STEPS[stage]) if self._mode_name == "step" else ""


_STEPS: Mapping[Any, Sequence[str]] = {
    TrainerFn.FITTING: ("training_step", "validation_step"),
    TrainerFn.VALIDATING: ("validation_step",),
    TrainerFn.TESTING: ("test_step",),
    TrainerFn.PREDICTING: ("predict_step",),
}
"""The steps of each of the Trainer's runs."""


def _check_forward_options(mode: str, parallel_modules: Sequence[str], move_batch: bool) -> None:
    """Raises a ValueError for impossible options of forward mode, and for those in step mode."""
    check_names("parallel_modules", parallel_modules)
    check_choice("move_batch", move_batch, (True, False))
    if mode == "step" and (parallel_modules or not move_batch):
        named = ("parallel_modules", list(parallel_modules))
        key, value = named if parallel_modules else ("move_batch", move_batch)
        raise ValueError(
            f'{key}: expected to be left out in step mode, got {value}. Use mode="forward", in '
            "which it has a meaning."
        )


_OF_ALL = (
    *("mode", "split", "sample_cost", "dim", "gather_overrides", "parallel_modules"),
    *("move_batch", "loss_reduction", "buffers"),
)
"""Those that all processes share."""
