"""Ours: one process, several devices."""

from __future__ import annotations

import threading
import time
from collections import defaultdict

from benchmarks.job import Job
from benchmarks.pace import Pace
from benchmarks.peers.peer import Peer
from benchmarks.peers.trainer import Paced, fit
from lightning.pytorch.profilers import Profiler

import lightning_dp

WAITS = f"{Paced.__name__}."
"""In the names of actions in which a turn ends, and the next one is waited for."""


def train(job: Job, pace: Pace) -> None:
    """By the strategy, with the job's options of it; the option `stages` is for the benchmark."""
    options = job.strategy_options
    profiler = SimpleProfiler(pace.stages) if options.pop("stages", False) else None
    strategy = lightning_dp.DataParallelStrategy(devices=job.torch_devices, **options)
    fit(
        job,
        pace,
        job.batches(),
        job.torch_devices,
        strategy=strategy,
        profiler=profiler,
    )


class SimpleProfiler(Profiler):
    """The seconds of each stage of a step, less those of stages inside of it.

    Our stages have their own names, `optimizer` and `backward` are what Lightning does there
    itself, and `loader` waits for the next batch; `lightning` is all that Lightning does beside.
    The strategy tells its stages to torch's profiler, and to profilers of Lightning's of this name.

    Args:
        seconds: gets them, by the stages' names.
    """

    def __init__(self, seconds: dict[str, float]) -> None:
        super().__init__()
        self._seconds = seconds
        self._inside: list[tuple[str, float, dict[str, float]]] = []

    def start(self, action_name: str) -> None:
        """A stage begins."""
        if threading.current_thread() is not threading.main_thread():
            return  # replicas are in their calls, which are a stage of the main thread
        self._inside.append((action_name, time.perf_counter(), defaultdict(float)))

    def stop(self, action_name: str) -> None:
        """The stage that has begun last ends."""
        if threading.current_thread() is not threading.main_thread():
            return
        name, start, parts = self._inside.pop()
        if name != action_name:
            raise RuntimeError(f"Expected {name} to end before {action_name} does.")
        seconds = time.perf_counter() - start
        if WAITS not in name:
            own = stage_of(name)
            self._seconds[own] = self._seconds.get(own, 0.0) + seconds - parts["all"]
        if self._inside:
            self._inside[-1][2]["all"] += seconds

    def summary(self) -> str:
        """Nothing: the pace tells."""
        return ""


def stage_of(action: str) -> str:
    """The stage that an action of Lightning's or ours belongs to.

    Example:
        >>> [stage_of("lightning_dp.reduce"), stage_of("[Strategy]DataParallelStrategy.backward")]
        ['reduce', 'backward']
    """
    if action.startswith("lightning_dp."):
        return action.removeprefix("lightning_dp.")
    for stage, sign in (("backward", ".backward"), ("loader", "dataloader_next")):
        if action.endswith(sign):
            return stage
    return "optimizer" if "optimizer_step" in action else "lightning"


PEER = Peer(train)
