"""The check of the first step: is a split batch's step that of the root alone, and if not, why?"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_dp.first_step.compare import Difference, Outcome
from lightning_dp.first_step.diagnosis import CHANCE, Diagnosis, cause_in_buffers
from lightning_dp.first_step.snapshot import Snapshot, trained_tensors
from lightning_dp.metrics import is_metric
from lightning_dp.modes import ForwardMode, Mode, Transfer
from lightning_dp.parallel.batch import to_device
from lightning_dp.parallel.contexts import Lasting
from lightning_dp.parallel.errors import described
from lightning_dp.parallel.gradients import LossReduction, StepOutput
from lightning_dp.parallel.split import Sizes

_SCALE = 256.0
"""Of the loss before a backward in float16, whose small gradients would become zero."""


@dataclass(frozen=True)
class FirstStep:
    """What the check of the first step has found."""

    sizes: Sizes = ()  # samples per device
    difference: Difference | None = None  # of the split batch; None if nothing was compared
    tolerance: float = 0.0  # up to which it is rounding
    causes: Mapping[str, str] = field(default_factory=dict)  # each with what to choose
    not_checked: str = ""  # why nothing was compared
    left: Sequence[str] = ()  # buffers that a split batch's step leaves different

    @property
    def is_same(self) -> bool:
        """Whether both gave the same step."""
        return self.has_same_gradient and not self.left

    @property
    def has_same_gradient(self) -> bool:
        """Whether both gave the same loss and gradient."""
        return self.difference is not None and self.difference.largest <= self.tolerance

    def __str__(self) -> str:
        """What is told."""
        if self.difference is None:
            return f"check_first_step: nothing was compared: {self.not_checked}"
        return (
            f"check_first_step: {sum(self.sizes)} samples split over the devices as "
            f"{', '.join(map(str, self.sizes))} {'give' if self.is_same else 'do not give'} the "
            f"step of the root alone. Relative difference of the loss {self.difference.loss:.1e}, "
            f"of the gradient {self.difference.gradient:.1e} (rounding: up to "
            f"{self.tolerance:.1e})." + "".join(f"\n- {text}" for text in self.causes.values())
        )

    def tell(self) -> None:
        """On the console and to the log; what is not the same is a warning."""
        if self.is_same or self.difference is None:
            rank_zero_info(str(self))
        else:
            warnings.warn(str(self), stacklevel=2)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Stands for `self.log`, and for turning layers off."""


@dataclass
class Runs:
    """Runs of one training step on one batch, alone and split, each as if it were the only one."""

    module: LightningModule
    mode: Mode  # of its own, for nothing else; its replicas run in order
    batch: Any  # as the step gets it
    args: tuple[Any, ...]  # the step's other arguments
    transfer: Transfer
    precision: Precision  # the Trainer's
    devices: Sequence[torch.device]  # the replicas' and the output device

    def __post_init__(self) -> None:
        """Notes how everything is, to put it back after each run."""
        self.spreads_forward = isinstance(self.mode, ForwardMode)
        scaler = getattr(self.precision, "scaler", None)
        self._scale = 1.0 if scaler is None or not scaler.is_enabled() else _SCALE
        self._parameters = trained_tensors(self.module)
        # The step itself goes through the graph of such a buffer, too.
        self._keeps_graph = any(buffer.grad_fn is not None for buffer in self.module.buffers())
        groups = [optimizer.param_groups for optimizer in self.module.trainer.strategy.optimizers]
        self._snapshot = Snapshot(self.module, self.devices, groups)

    @property
    def sizes(self) -> Sizes:
        """Samples per device in the latest split run."""
        return self.mode.engine.last_sizes

    @property
    def tolerance(self) -> float:
        """The relative difference that rounding can make."""
        precisions = {p.dtype for p in self._parameters if p.is_floating_point()}
        if "16" in str(self.precision.precision):
            precisions.add(torch.bfloat16 if self._scale == 1 else torch.float16)
        return rounding(precisions, self.devices[0].type)

    def alone(
        self,
        shard: int | None = None,
        *,
        off: Callable[[], None] = _nothing,
        seed: int | None = None,
    ) -> Outcome:
        """The step on the root, of the whole batch or of one shard of it, as on one device."""
        return self._run(lambda: self._step_alone(shard), off, seed)

    def split(self, *, off: Callable[[], None] = _nothing) -> Outcome:
        """The step split over the devices."""
        return self._run(self._step_split, off)

    def end(self) -> None:
        """Leaves everything as it was."""
        self._snapshot.end()
        self.mode.engine.close()

    def _run(
        self, step: Callable[[], Any], off: Callable[[], None], seed: int | None = None
    ) -> Outcome:
        try:
            self.module.__dict__["log"] = _nothing
            off()
            if seed is not None:
                self._snapshot.reseed(seed)
            with self.precision.train_step_context():
                output = step()
            if output is None:
                raise ValueError("training_step returned None")
            loss: Tensor = StepOutput.parse(output).loss
            with self.mode.during_backward():
                (loss * self._scale).backward(retain_graph=self._keeps_graph)
            return Outcome.of(loss, self._parameters, self.module)
        finally:
            self._snapshot.restore()

    def _step_alone(self, shard: int | None) -> Any:
        batch, root = copy.deepcopy(self.batch), self.devices[0]
        if shard is not None:
            batch = self.mode.engine.scatter(batch, lambda part, _: part).parts[shard]
        if self.spreads_forward:
            batch = to_device(batch, root)
            for submodule in self.module.modules():
                if is_metric(submodule):
                    submodule.to(root)
        else:
            batch = self.transfer(batch, root, 0)
        return self.module.training_step(batch, *self.args)

    def _step_split(self) -> Any:
        self.mode.engine.resync()
        return self.mode.step("training_step", copy.deepcopy(self.batch), self.args)


def rounding(precisions: Iterable[torch.dtype], device_type: str) -> float:
    """The relative difference that roundings of numbers of these precisions can make.

    That is half of their digits. GPUs that are told to compute products with 10 bits of float32's
    23, as torch tells them for convolutions and recurrent layers, have a hundredth.
    """
    eps = max([torch.finfo(dtype).eps for dtype in precisions], default=0.0)
    cudnn: Any = torch.backends.cudnn
    kinds = cudnn.conv, cudnn.rnn, torch.backends.cuda.matmul
    is_short = device_type == "cuda" and "tf32" in [kind.fp32_precision for kind in kinds]
    return float(max(eps**0.5, 1e-2 if is_short and eps > 1e-9 else 0.0))


def check_first_step(
    module: LightningModule,
    batch: Any,
    args: tuple[Any, ...],
    *,
    make_mode: Callable[[], Mode],
    loss_reduction: LossReduction,
    **options: Any,
) -> FirstStep:
    """Runs a training step on the root alone and split, compares, and looks for the cause.

    Leaves no trace: gradients, buffers, random numbers, metrics, logs and attributes are as before.
    The mode that `make_mode` makes is as the training's, but for replicas that run in order; the
    other arguments are those of `Runs`.
    """
    if not module.automatic_optimization:
        return FirstStep(not_checked="with manual optimisation the step itself trains.")
    if isinstance(batch, Iterator):
        return FirstStep(not_checked="the step takes an iterator, which gives a batch only once.")
    with _Unheard(module), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # training will give them again
        try:
            mode = make_mode()
            mode.mute()
            runs = Runs(module, mode, batch, args, **options)
            try:
                return _compared(runs, loss_reduction)
            finally:
                runs.end()
        except Exception as error:  # whatever it is, training will say it better
            return FirstStep(not_checked=f"{type(error).__name__}: {described(error, str)}")


def _compared(runs: Runs, loss_reduction: LossReduction) -> FirstStep:
    alone = runs.alone()
    if not alone.is_finite:
        return FirstStep(not_checked="the loss or its gradient is no number, on the root alone.")
    split = runs.split()
    difference = Difference.between(split, alone)
    sizes = runs.sizes
    if len([size for size in sizes if size]) < 2:
        return FirstStep(not_checked="the batch ran on one device.")
    left = alone.left_differently(split, runs.tolerance)
    found = FirstStep(sizes, difference, runs.tolerance, left=left)
    if found.has_same_gradient:
        return replace(found, causes=cause_in_buffers(left))
    try:
        causes = Diagnosis(runs, alone, loss_reduction).causes()
    except Exception as error:
        text = f"{type(error).__name__}: {described(error, str)}"
        causes = {"unknown": f"The cause was not found ({text})."}
    if causes.keys().isdisjoint(CHANCE):  # else chance is in the buffers, too
        causes = {**causes, **cause_in_buffers(left)}
    return replace(found, causes=causes)


class _Unheard(Lasting):
    """Loggers hear nothing."""

    def __init__(self, module: LightningModule) -> None:
        self._trainer = module.trainer
        self._loggers = list(self._trainer.loggers)

    def begin(self) -> None:
        self._trainer.loggers = [DummyLogger() for _ in self._loggers]

    def end(self) -> None:
        self._trainer.loggers = self._loggers
