"""The bench: runs a job on one device and on several, and says how far they are apart."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_dp import DataParallelStrategy
from lightning_dp.doctor.law import SkippedLaw, worst
from lightning_dp.doctor.subjects import Classifier, batches_of

STEPS = 10
ALLOWED = {"64": 1e-10, "32": 1e-5, "bf16-mixed": 6e-2, "16-mixed": 8e-3}
"""Relative difference after a step; the last two are 8 times what their dtype rounds to."""

_LOGGERS = ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero", "lightning_dp")


@dataclass(frozen=True)
class Job:
    """A short training.

    Args:
        make: the module's class.
        precision: a key of `ALLOWED`.
        sizes: samples per batch; by default those that leave every device some, and not equally
            many.
        trainer: options of the Trainer, for one device, too.
        strategy: options of the strategy with several.
    """

    make: Callable[[], Classifier] = Classifier
    precision: str = "64"
    sizes: Sequence[int] = ()
    trainer: Mapping[str, Any] = field(default_factory=dict)
    strategy: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Record:
    """What a training has left. Tensors are on the CPU, in double precision."""

    losses: Tensor
    start: Tensor  # all parameters and floating buffers as one vector
    first: Tensor  # after the first step
    last: Tensor
    logged: dict[str, float]
    module: LightningModule
    trainer: Trainer

    def apart(self, oracle: Record, *, steps: int = STEPS) -> float:
        """How far losses, and the way that the weights have gone, are off: relative to those."""
        mine = self.first if steps == 1 else self.last
        theirs = oracle.first if steps == 1 else oracle.last
        way = relative(mine - self.start, theirs - oracle.start)
        return worst([relative(self.losses[:steps], oracle.losses[:steps]), way])


class Bench:
    """The devices, and what was run on them.

    Args:
        devices: those of the replicas, root first, at least two; one may repeat.
        folder: for files.
    """

    def __init__(self, devices: Sequence[torch.device], folder: Path) -> None:
        self.devices = list(devices)
        self.folder = folder
        self._records: dict[str, Record] = {}

    @property
    def root(self) -> torch.device:
        """The first device, which is the oracle when it works alone."""
        return self.devices[0]

    @property
    def distinct(self) -> list[torch.device]:
        """Every device once."""
        return list(dict.fromkeys(self.devices))

    def afresh(self, devices: Sequence[torch.device] | None = None) -> Bench:
        """A bench on which nothing was run, of other devices perhaps."""
        return Bench(devices or self.devices, self.folder)

    def apart(self, job: Job, *, steps: int = STEPS) -> float:
        """How far the job on several devices is off the one on the root alone."""
        return self.several(job).apart(self.one(job), steps=steps)

    def one(self, job: Job) -> Record:
        """The job on the root alone, in plain Lightning."""
        return self._cached(f"one {job.make} {_all_but_strategy(job)}", job, self.alone())

    def several(self, job: Job) -> Record:
        """The job on all devices."""
        key = f"several {job.make} {_all_but_strategy(job)} {job.strategy}"
        return self._cached(key, job, self.strategy(**job.strategy))

    def strategy(self, **options: Any) -> DataParallelStrategy:
        """Of all devices; in threads, unless options say otherwise."""
        return DataParallelStrategy(devices=self.devices, **{"executor": "threads", **options})

    def alone(self) -> Strategy:
        """Of the root alone: plain Lightning."""
        return SingleDeviceStrategy(self.root)

    def module(self, job: Job) -> Classifier:
        """The job's module, from the same seed as ever."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            return job.make().to(_dtype(job.precision))

    def batches(self, job: Job) -> DataLoader[Any]:
        """The job's batches."""
        sizes = job.sizes or [6 * len(self.devices) + 1] * STEPS
        # Lightning takes a plain list for several loaders.
        batches: Any = batches_of(list(sizes), _dtype(job.precision))
        return DataLoader(batches, batch_size=None)

    def trainer(self, job: Job, strategy: Strategy, *callbacks: Callback, **more: Any) -> Trainer:
        """A Trainer that writes and says nothing."""
        self._check_precision(job.precision)
        options: dict[str, Any] = {"max_epochs": 1, **job.trainer, **more}
        if job.precision.endswith("mixed"):
            options["plugins"] = [_mixed(job.precision, self.root.type)]
        return quiet_trainer(self.root, self.folder, strategy, *callbacks, **options)

    def _cached(self, key: str, job: Job, strategy: Strategy) -> Record:
        if key not in self._records:
            module, watch = self.module(job), Watch()
            trainer = self.trainer(job, strategy, watch)
            trainer.fit(module, self.batches(job))
            self._records[key] = watch.record(module, trainer)
        return self._records[key]

    def _check_precision(self, precision: str) -> None:
        kind = self.root.type
        if precision == "64" and not has_float64(self.root):
            raise SkippedLaw(f"{kind} has no float64")
        module = torch.get_device_module(kind) if kind != "cpu" else None
        if precision == "bf16-mixed" and not getattr(module, "is_bf16_supported", lambda: True)():
            raise SkippedLaw(f"{self.root} has no bfloat16")


class Watch(Callback):
    """Notes what a training leaves. The host waits for nothing before its end."""

    def __init__(self) -> None:
        self.states: list[list[Tensor]] = []
        self._losses: list[Tensor] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Notes where the weights start."""
        self._note(pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any
    ) -> None:
        """Notes the loss, and the weights after the first step."""
        loss = outputs["loss"] if "loss" in outputs else trainer.callback_metrics["loss"]
        self._losses.append(loss.detach().clone())
        if len(self._losses) == 1:
            self._note(pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Notes where the weights end."""
        self._note(pl_module)

    def _note(self, module: LightningModule) -> None:
        state = module.state_dict().values()
        self.states.append([t.detach().clone() for t in state if t.is_floating_point()])

    def record(self, module: LightningModule, trainer: Trainer) -> Record:
        """What the training has left, once it is over."""
        start, first, last = (as_vector(state) for state in self.states)
        logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
        return Record(as_vector(self._losses), start, first, last, logged, module, trainer)


def quiet_trainer(
    root: torch.device, folder: Path, strategy: Strategy, *callbacks: Callback, **options: Any
) -> Trainer:
    """A Trainer for devices like the root, without logger, checkpoints, progress bar, summary."""
    return Trainer(
        accelerator={"cuda": "gpu"}.get(root.type, root.type),
        strategy=strategy,
        callbacks=list(callbacks),
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        **options,
    )


@contextlib.contextmanager
def muted() -> Iterator[None]:
    """Keeps what Lightning, torch and we say of these small trainings off the screen."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def synchronize(devices: Sequence[torch.device]) -> None:
    """Waits for all work of the devices."""
    for device in dict.fromkeys(devices):
        if device.type != "cpu":
            torch.accelerator.synchronize(device)


def pinned(tensor: Tensor) -> Tensor:
    """The same in memory that an accelerator copies from by itself; where there is such memory."""
    try:
        return tensor.pin_memory()
    except RuntimeError:  # none, or not for this accelerator
        return tensor


def has_float64(device: torch.device) -> bool:
    """Whether a device computes in double precision."""
    try:
        torch.ones(1, dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):
        return False
    return True


def as_vector(tensors: Sequence[Tensor]) -> Tensor:
    """All elements, on the CPU, in double precision."""
    return torch.cat([t.detach().cpu().double().reshape(-1) for t in tensors])


def relative(mine: Tensor, theirs: Tensor) -> float:
    """The largest difference of two tensors, relative to the largest element of the second."""
    if mine.shape != theirs.shape:
        return float("inf")
    off = float((mine - theirs).abs().max()) if mine.numel() else 0.0
    scale = float(theirs.abs().max()) if mine.numel() else 0.0
    return worst([off / scale if scale else off])


def _dtype(precision: str) -> torch.dtype:
    return torch.float64 if precision == "64" else torch.float32


def _mixed(precision: str, kind: str) -> MixedPrecision:
    if precision == "bf16-mixed":
        return MixedPrecision("bf16-mixed", kind)
    scaler = torch.amp.GradScaler(kind, init_scale=1024.0)
    return MixedPrecision("16-mixed", kind, scaler)


def _all_but_strategy(job: Job) -> str:
    return f"{job.precision} {job.sizes} {job.trainer}"
