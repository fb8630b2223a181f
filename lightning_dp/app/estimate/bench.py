"""Trainings of a few steps within a memory, for ``python -m lightning_dp estimate``."""

from __future__ import annotations

import gc
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

import lightning_dp
from lightning_dp import DataParallelStrategy
from lightning_dp.doctor import Workload, muted, quiet_trainer
from lightning_dp.parallel.batch import infer_batch_size, infer_for
from lightning_dp.parallel.devices import (
    allocated_memory,
    out_of_memory_count,
    peak_memory,
    reset_peak_memory,
)

STEPS = 8
"""Of a training: the optimizer's state comes with the first, split="memory" learns for some."""


PARTS = ("weights", "gradients", "optimizer", "activations")


@dataclass(frozen=True)
class Use:
    """What one device held at its peak, in bytes; the parts' sum is `peak`."""

    device: str
    samples: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    other: int

    @property
    def peak(self) -> int:
        """The most that was in use at once."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.other


@dataclass(frozen=True)
class Run:
    """A training that came to its end: what each device held, and whether one ran out meanwhile."""

    sizes: tuple[int, ...]
    uses: tuple[Use, ...]
    ran_out: bool

    @property
    def fullest(self) -> Use:
        """The device that held most."""
        return max(self.uses, key=lambda use: use.peak)


def maker_of_batches(workload: Workload) -> tuple[Callable[[int], Any], int]:
    """What makes a batch of n of the workload's samples, and how many its own batches have.

    The data set's samples are collated as its DataLoader does, from the first one on, again and
    again. Without a data set of samples, the first batch is repeated and cut.
    """
    batch = workload.batches(0)[0]
    size = infer_for(workload.make(), batch).size
    if not size:
        raise ValueError(
            f"{workload.name}: expected batches with samples to count, got one without any."
        )
    loader = workload.loader() if workload.loader else None
    if isinstance(loader, DataLoader) and loader.batch_size and not _is_stream(loader.dataset):
        data: Any = loader.dataset
        return lambda n: loader.collate_fn([data[i % len(data)] for i in range(n)]), size

    def repeated(n: int) -> Any:
        whole = lightning_dp.gather([batch] * math.ceil(n / size), "cpu")
        left = infer_batch_size(whole, 0).size or n
        return lightning_dp.scatter(whole, ["cpu", "cpu"], [n, left - n])[0]

    return repeated, size


def _is_stream(data: object) -> bool:
    return isinstance(data, IterableDataset)


class Bench:
    """Takes steps of a workload, with batches of any size, on some devices."""

    def __init__(self, workload: Workload, devices: Sequence[torch.device]) -> None:
        self.devices = list(devices)
        self.name, self.weights = workload.name, workload.strategy.get("weights")
        self.batch, self.own_size = maker_of_batches(workload)
        self._workload = workload

    def run(self, n: int, options: Mapping[str, Any], limit: int | None = None) -> Run | None:
        """A training with batches of n samples; None where memory did not do.

        Args:
            n: samples of all devices.
            options: of the strategy.
            limit: bytes that each simulated device can have for it.
        """
        gc.collect()
        distinct = list(dict.fromkeys(self.devices))
        before = {device: allocated_memory(device) for device in distinct}
        failures = [out_of_memory_count(device) for device in distinct]
        for device in distinct:
            reset_peak_memory(device)
        watch = _Watch(self.devices)
        try:
            with _limited(before, limit):
                self._fit(n, options, watch)
        except torch.OutOfMemoryError:
            return None
        ran_out = failures != [out_of_memory_count(device) for device in distinct]
        uses = [watch.use(k, device, before[device]) for k, device in enumerate(self.devices)]
        return Run(tuple(watch.sizes), tuple(uses), ran_out)

    def _fit(self, n: int, options: Mapping[str, Any], watch: _Watch) -> None:
        options = {**self._workload.strategy, **options, "devices": self.devices}
        strategy = DataParallelStrategy(**options)
        more: Any = {"max_epochs": 1, **self._workload.trainer}
        repeated: Any = [self.batch(n)] * STEPS  # Lightning takes a list for several loaders
        with tempfile.TemporaryDirectory() as folder, muted():
            trainer = quiet_trainer(self.devices[0], Path(folder), strategy, watch, **more)
            torch.manual_seed(0)
            trainer.fit(self._workload.make(), DataLoader(repeated, batch_size=None))


@contextmanager
def _limited(before: Mapping[torch.device, int], limit: int | None) -> Iterator[None]:
    """Each simulated device can have so many bytes more."""
    simulated = [device for device in before if limit is not None and device.type == "sim"]
    for device in simulated:
        torch.get_device_module("sim").set_memory_limit(device, before[device] + (limit or 0))
    try:
        yield
    finally:
        for device in simulated:
            torch.get_device_module("sim").set_memory_limit(device, None)


class _Watch(Callback):
    """Notes what the devices hold, and of what it is. The peaks are theirs: none is reset."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.sizes: Sequence[int] = ()
        self._devices = devices
        self._none = [0] * len(devices)
        self._peaks: list[int] = []
        self._start: list[int] = []
        self._parts: dict[str, list[int]] = {}

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Before the forward."""
        self._start = self._in_use()

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, _: Tensor) -> None:
        """What the forward has left for the backward."""
        added = (now - before for now, before in zip(self._in_use(), self._start, strict=True))
        most = self._parts.get("activations", self._none)
        self._parts["activations"] = list(map(max, most, added))

    def on_before_optimizer_step(self, trainer: Trainer, *_: Any) -> None:
        """All gradients are there."""
        module: Any = trainer.lightning_module
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        self._parts["gradients"] = [_bytes(gradients)] * len(self._devices)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, _: Any, batch: Any, *__: Any
    ) -> None:
        """The step is over, and the optimizer's state is there."""
        weights = _bytes([*pl_module.parameters(), *pl_module.buffers()])
        self._parts["weights"] = [weights] * len(self._devices)
        state = [t for o in trainer.optimizers for one in o.state.values() for t in one.values()]
        tensors = [t for t in state if isinstance(t, Tensor)]
        self._parts["optimizer"] = [_bytes(tensors, device) for device in self._devices]
        strategy: Any = trainer.strategy
        self.sizes = strategy.last_sizes or [infer_batch_size(batch, 0).size or 0]
        self._peaks = list(map(peak_memory, self._devices))

    def use(self, k: int, device: torch.device, before: int) -> Use:
        """What a device held at its peak, without what was there before."""
        parts = {name: self._parts.get(name, self._none)[k] for name in PARTS}
        peak = self._peaks[k] - before
        # Gradients come as activations go: at the peak there are as many as it leaves room for.
        left = max(0, peak - parts["weights"] - parts["optimizer"])
        parts["activations"] = min(parts["activations"], left)
        left -= parts["activations"]
        parts["gradients"] = min(parts["gradients"], left)
        return Use(str(device), self.sizes[k], **parts, other=left - parts["gradients"])

    def _in_use(self) -> list[int]:
        return list(map(allocated_memory, self._devices))


def _bytes(tensors: Iterable[Tensor], device: torch.device | None = None) -> int:
    """What they take on a device, each piece of memory once."""
    here = (t.untyped_storage() for t in tensors if device in (None, t.device))
    return sum({piece.data_ptr(): piece.nbytes() for piece in here}.values())
