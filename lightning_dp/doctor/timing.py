"""Step times: of one device, and of the strategies with several."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from torch.utils.data import DataLoader

from lightning_dp import DataParallelStrategy
from lightning_dp.doctor.bench import muted, quiet_trainer, synchronize
from lightning_dp.doctor.machine import load
from lightning_dp.doctor.workloads import Workload
from lightning_dp.parallel.devices import cores, memory_capacity, peak_memory, reset_peak_memory

WARM_UP = 3  # steps that are not counted: caches, graphs, the first unequal shards
LEAST_STEPS = 2  # that are, however long they take
MOST_STEPS = 30
SECONDS = 0.8  # of steps, after which a measurement ends
ENOUGH = 0.03  # seconds of a step that tells more than its overhead
LARGEST = 4096  # samples in a batch
ROUNDS = 2  # in turns: a machine that is busy for a while is so for all


@contextlib.contextmanager
def fair_threads() -> Iterator[None]:
    """One thread per operation on a machine that is busy.

    An operation of several threads takes as long as the last of them, which has to wait for a core.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1 if load() > cores() else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Stopwatch(Callback):
    """Times the steps of a fit, and ends it when it has seen enough.

    Args:
        devices: those that are waited for before a step and after it.
        enough: seconds of steps after which the fit ends.
        clock: what tells the time, in seconds.
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        enough: float = SECONDS,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.seconds: list[float] = []
        self._devices, self._enough, self._clock = devices, enough, clock
        self._start = self._begin = 0.0
        self._others = WARM_UP

    def on_train_batch_start(self, *_: Any) -> None:
        """Starts the step's time when the devices have nothing to do."""
        synchronize(self._devices)
        self._start = self._clock()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *_: Any, **kwargs: Any
    ) -> None:
        """Ends it when they are through."""
        synchronize(self._devices)
        now = self._clock()
        self._begin = self._begin or now  # the first step makes what the others use
        is_late = now - self._begin > self._enough and trainer.world_size == 1
        if self._others and not is_late:
            self._others -= 1
            return
        self._others = 0
        self.seconds.append(now - self._start)
        # Several processes have to end with the same step.
        if is_late and len(self.seconds) >= LEAST_STEPS:
            trainer.should_stop = True

    @property
    def step(self) -> float:
        """Seconds of a step: the median."""
        return statistics.median(self.seconds)


def timed(
    workload: Workload,
    batches: Sequence[Any],
    strategy: Strategy,
    own: Sequence[torch.device],
    folder: Path,
    *,
    steps: int = MOST_STEPS,
    **options: Any,
) -> float:
    """Seconds per step of a workload, through a Trainer. Batches are in memory already.

    Args:
        workload: what is trained.
        batches: taken in turns.
        strategy: the way.
        own: the devices that this process uses.
        folder: for files.
        steps: at most.
        options: of the Trainer.
    """
    watch = Stopwatch(own)
    steps += WARM_UP
    # Lightning takes a plain list for several loaders.
    repeated: Any = [batches[i % len(batches)] for i in range(steps)]
    options = {"max_epochs": 1, "min_epochs": 0, **workload.trainer, **options}
    with muted():
        trainer = quiet_trainer(own[0], folder, strategy, watch, **options)
        torch.manual_seed(0)
        trainer.fit(workload.make(), DataLoader(repeated, batch_size=None))
    return watch.step


def size_of_batches(
    workload: Workload,
    devices: Sequence[torch.device],
    folder: Path,
    seconds_left: Callable[[], float],
) -> int:
    """Samples per batch with which a step of one device takes long enough to tell something."""
    n = 8 * len(devices)
    if not workload.grows:
        return n
    root = devices[0]
    while 2 * n <= LARGEST and seconds_left() > 0:
        reset_peak_memory(root)
        strategy = SingleDeviceStrategy(root)
        seconds = timed(workload, workload.batches(n), strategy, [root], folder, steps=2)
        is_full = memory_capacity(root) and 8 * peak_memory(root) > memory_capacity(root)
        if seconds >= ENOUGH or is_full:
            break
        n *= 2
    return n


def ways_in_one_process(
    workload: Workload, devices: Sequence[torch.device]
) -> dict[str, Callable[[], Strategy]]:
    """What makes the strategies that are compared, by their names in the report."""
    options = {"devices": devices, **workload.strategy}
    ways: dict[str, Callable[[], Strategy]] = {
        "one device": lambda: SingleDeviceStrategy(devices[0])
    }
    if len(devices) > 1:
        ways["threads"] = lambda: DataParallelStrategy(executor="threads", **options)
        ways["inorder"] = lambda: DataParallelStrategy(executor="inorder", **options)
    return ways


def times_in_one_process(
    workload: Workload,
    batches: Sequence[Any],
    devices: Sequence[torch.device],
    folder: Path,
    seconds_left: Callable[[], float],
) -> dict[str, float]:
    """Seconds per step of one device and of dp_custom in its two ways, as long as there is time."""
    best: dict[str, float] = {}
    for i in range(ROUNDS):
        before = seconds_left()
        for name, make in ways_in_one_process(workload, devices).items():
            if best and seconds_left() <= 0:
                return best
            seconds = timed(workload, batches, make(), devices, folder)
            best[name] = min(best.get(name, seconds), seconds)
        if i == 0 and 2 * seconds_left() < before:
            break  # others want their turn, too
    return best
