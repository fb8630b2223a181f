"""What a strategy with several devices is told: its options, checked, and the mode they ask for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from typing_extensions import override

from lightning_dp.alone import AloneSteps
from lightning_dp.checkpointing import CheckpointMixin
from lightning_dp.fewer_devices import FewerDevicesHint
from lightning_dp.modes import MODES, ForwardMode, Mode, StepMode, check_mode_options
from lightning_dp.parallel.batch import Override
from lightning_dp.parallel.checks import check_choice
from lightning_dp.parallel.data_parallel import check_engine_options
from lightning_dp.parallel.devices import memory_capacities, resolve_devices, resolve_output_device
from lightning_dp.parallel.gradients import LOSS_REDUCTIONS
from lightning_dp.parallel.split import Auto, OwnSplit, check_split, split_policy

Look: TypeAlias = AloneSteps | FewerDevicesHint
"""Who looks whether all devices need to work."""


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
            balanced; `self.all_gather` gives each the whole batch's tensors, and manual
            optimisation acts once for all. `"forward"`: it runs once, with the whole batch on the
            output device, and only `self(x)` is spread over the replicas: exact for losses over
            the whole batch (contrastive, triplet) as they are written. A 0-dim float that
            `forward` returns, a loss say, is a mean over its samples.
        devices: the devices, root first, in place of `Trainer(devices=...)`. An entry may repeat
            for several replicas on one device: `["cuda:0", "cuda:0"]`, `["cpu"] * 4`. Integers
            are ids of the machine's accelerator.
        output_device: where loss, logs and gathered outputs end up. None for the root device, a
            name (`"cuda:1"`, `"cpu"`), a `torch.device`, or an integer: a device's id (on the
            CPU, a replica's index).
        split: how samples are shared out. `"even"`: sizes differ by at most one, larger ones
            first, and with fewer samples than devices some are idle. `"auto"`: as `"adaptive"`, on
            as many devices as make a step shortest; where the root alone is fastest, it does the
            step as Lightning itself would. It goes by times: two runs may differ by rounding, but
            with `Trainer(deterministic=True)` it is `"even"`. `"chunk"`: the sizes of
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
        check_split(split, weights, sample_cost)
        check_engine_options(dim, buffers, executor, gather_overrides)
        check_choice("check_first_step", check_first_step, (False, True))
        engine = {"dim": dim, "cost_key": sample_cost, "overrides": gather_overrides}
        engine |= {"buffers": buffers, "executor": executor}
        make = _mode_maker(mode, loss_reduction, parallel_modules, move_batch)
        self._make_mode = partial(make, **engine)
        self._make_split = partial(split_policy, split, weights)
        self._output_device = output_device
        self._loss_reduction = loss_reduction
        self._is_even = split == "even" and weights is None
        self._check_first_step = check_first_step
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
        """Takes the devices, ours or the Trainer's, and checks what depends on them."""
        self._devices = parallel_devices
        if parallel_devices:
            capacities = partial(memory_capacities, parallel_devices)
            self.split_policy = self._make_split(parallel_devices, capacities)
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

    def _new_mode(self, **others: Any) -> Mode:
        """Makes the mode that the options ask for, but for some others."""
        options: dict[str, Any] = {
            "transfer": super().batch_to_device,
            "output_device": self.output_device,
            "split": self.split_policy,
        }
        return self._make_mode(self.lightning_module, self.parallel_devices, **options | others)

    def _new_look(self, mode: Mode, trainer: Trainer) -> Look | None:
        if isinstance(self.split_policy, Auto):
            return AloneSteps(mode, self.split_policy, trainer)
        if self._is_even and mode.engine.on_cpu and isinstance(mode, StepMode):
            return FewerDevicesHint(mode, trainer)
        return None


def _mode_maker(
    mode: str, loss_reduction: str, parallel_modules: Sequence[str], move_batch: bool
) -> Callable[..., Mode]:
    check_choice("mode", mode, MODES)
    check_choice("loss_reduction", loss_reduction, LOSS_REDUCTIONS)
    check_mode_options(mode, parallel_modules, move_batch)
    if mode == "step":
        return partial(StepMode, loss_reduction=loss_reduction)
    return partial(ForwardMode, parallel_modules=parallel_modules, move_batch=move_batch)
