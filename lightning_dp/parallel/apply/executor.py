"""Executor: makes one call per replica, in worker threads or one after another."""

from __future__ import annotations

import gc
import os
import statistics
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from lightning_dp.parallel.apply import worker
from lightning_dp.parallel.apply.rendezvous import Calls, Task, current_participant
from lightning_dp.parallel.apply.thread_state import ThreadState, is_checkpointing
from lightning_dp.parallel.apply.worker import Worker, have_ended, start_workers
from lightning_dp.parallel.checks import check_choice
from lightning_dp.parallel.comm import DeviceTimer
from lightning_dp.parallel.devices import replica_names, seed_apart
from lightning_dp.parallel.errors import add_note
from lightning_dp.parallel.torch_private import (
    cached_values,
    has_modes,
    saved_tensors_functions,
    watch_checkpoints,
)

ExecutorName: TypeAlias = Literal["auto", "threads", "inorder"]
EXECUTORS: tuple[ExecutorName, ...] = ("auto", "threads", "inorder")

CACHED = (
    "Expected no torch.nn.utils.parametrize.cached() where replicas run at once or wait for each "
    "other, got one: torch has one cache for all, so a replica would compute with another one's "
    'weights, on their device. Choose executor="inorder", or, where replicas meet in a step '
    "(collectives, synced batch norm), leave cached() out."
)
CHECKPOINT = (
    "Expected no activation checkpoint (torch.utils.checkpoint) that restores random numbers where "
    "replicas run in threads and share {device}'s generator, got one: other replicas draw from it "
    "meanwhile, so the backward would recompute with other numbers than the forward. Choose "
    'executor="inorder", or preserve_rng_state=False if nothing in it is random.'
)

# [Note: no garbage collection while replicas run in threads]
# Before Python 3.12 any new object may start a collection, also where torch makes one while it
# holds the lock of a random generator (`get_rng_state`, in activation checkpoints). If that frees
# a tensor, other threads run; one that waits for the same lock keeps the interpreter's, for ever.
COLLECTS_ANYWHERE = sys.version_info < (3, 12)


class Executor:
    """Makes the calls of all replicas, and returns their results in order.

    In `"threads"`, where replica k always runs in worker k; `"inorder"`, one after another on the
    calling thread, for a debugger or to repeat a run bit by bit; or `"auto"`, which measures both
    for each kind of call and keeps the faster: threads win where the devices compute, in order
    wins where Python is the bottleneck.

    Args:
        devices: the replicas' devices, the root device first.
        how: "threads", "inorder" or "auto".
        on_left_behind: called when a replica did not end: its thread may still use the module.
        names: the replicas' names, for errors.
        timeout: seconds that replicas wait in a rendezvous for one that does not come.
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        how: ExecutorName = "auto",
        on_left_behind: Callable[[], None] = lambda: None,
        names: Sequence[str] | None = None,
        timeout: float = Calls.timeout,
    ) -> None:
        check_choice("executor", how, EXECUTORS)
        self._devices, self._timeout = list(devices), timeout
        self._measures = how == "auto"
        self._allows_threads = how != "inorder"
        self._on_left_behind = on_left_behind
        self._names = replica_names(devices) if names is None else names
        self._is_on_one_device = len(set(devices)) == 1
        self._is_on_cpu = all(device.type == "cpu" for device in devices)
        self._in_threads: dict[str, bool] = {}  # the latest calls of each kind
        self._tuners: defaultdict[tuple[str, int], ExecutorTuner] = defaultdict(ExecutorTuner)
        self._latest: dict[str, ExecutorTuner | None] = {}
        self._workers: list[Worker] = []
        self._pid = 0  # of the process that has them
        if self._allows_threads:
            watch_checkpoints(_watch_checkpoint)

    def choose(self, kind: str, count: int, *, compiles: bool = False) -> bool:
        """Chooses threads or in order for `count` calls of a kind, and for their backward.

        One call alone and modules that torch.compile may compile run in order. Returns whether in
        threads.
        """
        tuner, in_threads = None, self._allows_threads and count > 1 and not compiles
        if in_threads and has_modes() and is_checkpointing(saved_tensors_functions()):
            in_threads = False  # its saved tensors are known by their order
        elif in_threads and self._measures:
            # Who asks for deterministic algorithms wants every run to make the same choice.
            in_threads = not torch.are_deterministic_algorithms_enabled()
            if in_threads:
                tuner = self._tuners[kind, count]
                in_threads = tuner.begin()
        self._latest[kind], self._in_threads[kind] = tuner, in_threads
        return in_threads

    def run(
        self,
        kind: str,
        tasks: Sequence[Task],
        *,
        continues_previous: bool = False,
        calls: Calls | None = None,
    ) -> list[Any]:
        """Makes the calls and waits for all of them.

        An error of a replica ends those that wait for it in a rendezvous; it is raised when all
        have ended, as it is, with a note that names replica, device, stage and samples. An
        interrupt waits some seconds for replicas that run; those that do not end are named, and
        their threads left behind. A second interrupt is raised at once.

        Args:
            kind: the name of the calls; `"auto"` chooses for each kind.
            tasks: at most one per replica.
            continues_previous: whether these calls run as the latest ones of this kind did and
                count with them, as a backward with its forward: a change of threads costs more
                than either way saves.
            calls: the state of this apply; None to make one.
        """
        calls = calls or Calls()
        calls.names, calls.timeout, calls.grace = self._names, self._timeout, worker.GRACE_SECONDS
        if not continues_previous:
            self.choose(kind, len(tasks))
        if not self._is_on_one_device:
            _seed_devices(self._devices)
        in_threads = len(tasks) > 1 and self._in_threads[kind]
        tuner, cached = self._latest[kind], cached_values()
        timer = DeviceTimer(self._devices) if tuner is not None and tuner.is_measured else None
        is_plain = self._is_on_cpu and not (
            torch.is_inference_mode_enabled() or torch.is_autocast_enabled("cpu") or has_modes()
        )
        state = None if is_plain else ThreadState(self._devices)
        collects = COLLECTS_ANYWHERE and in_threads and gc.isenabled()  # see the note
        if collects:
            gc.disable()
        try:
            calls.run(tasks, state, self._submit, in_threads=in_threads)
        except BaseException as interrupt:
            calls.end(interrupt)
            raise
        finally:
            if collects:
                gc.enable()
            if calls.broken is not None and (unended := calls.unended()):
                self._leave_behind(unended)
            results, failed, error = calls.close()
        if tuner is not None and timer is not None:
            timer.end()
            tuner.add(timer)
        if calls.drawn_in_checkpoint is not None and len(tasks) > 1:
            self._allows_threads = False
            if in_threads:
                raise RuntimeError(CHECKPOINT.format(device=calls.drawn_in_checkpoint)) from error
        if cached_values() is not cached and len(tasks) > 1:
            self._allows_threads = False
            if in_threads or calls.have_met:
                raise RuntimeError(CACHED) from error
        if error is not None:
            if failed is not None:
                add_note(error, f"[in {failed.name}{failed.context()}]")
            raise error
        return results

    def _submit(self, replica: int, work: Callable[[], None]) -> None:
        """Has a function called in a replica's worker; the first time, and in a fork, of a new one.

        A forked child has none of its parent's threads.
        """
        if not self._workers or self._pid != os.getpid():
            self._workers, self._pid = start_workers(self._devices), os.getpid()
        self._workers[replica].inbox.put(work)

    def _leave_behind(self, tasks: Sequence[Task]) -> None:
        """Gives up workers that did not end: later calls get new ones."""
        self._on_left_behind()
        workers = self._dismiss()
        for task in tasks:
            workers[task.replica].leave_behind(task.name + task.context())

    def is_in_threads(self, kind: str) -> bool:
        """Whether the latest calls of a kind ran in threads."""
        return self._in_threads.get(kind, True)

    def is_settled(self, kind: str | None = None) -> bool:
        """Whether calls of a kind, or of all, run as they will from now on."""
        tuners = [t for name, t in self._latest.items() if t and kind in (None, name)]
        return not any([tuner.is_comparing for tuner in tuners])

    def rest(self) -> None:
        """Waits until the workers no longer refer to their latest calls."""
        marks = [threading.Event() for _ in self._workers if self._pid == os.getpid()]
        for w, mark in zip(self._workers, marks, strict=False):
            w.inbox.put(mark.set)
        for mark in marks:
            mark.wait()

    def _dismiss(self) -> list[Worker]:
        """Lets the workers go; each ends after its present call."""
        workers, self._workers = self._workers, []
        for w in workers:
            w.inbox.put(None)
        return workers

    def close(self) -> None:
        """Ends the workers; a later `run` starts new ones."""
        workers = self._dismiss()
        if not have_ended(workers, worker.GRACE_SECONDS):
            for w in workers:
                w.leave_behind()


class ExecutorTuner:
    """Chooses threads or in order for one kind of call: measures both, then keeps the faster.

    Both take turns, a row of calls each; the first call of a row does not count, since it starts
    threads and fills caches. After `INTERVAL` calls they are compared again. The first call is made
    in order: it shows whether there is something in it that must not run in threads.
    """

    ROW, ROWS = 4, 4
    INTERVAL = 2000

    def __init__(self) -> None:
        self.is_comparing = self.is_measured = True
        self._choices = self._choose()
        self._timers: dict[bool, list[list[DeviceTimer]]] = {True: [], False: []}
        self._measured: list[DeviceTimer] = []  # of the present call: its forward, its backward

    def begin(self) -> bool:
        """Chooses for the next call; returns whether it runs in threads."""
        threads, self.is_measured = next(self._choices)
        if self.is_measured:
            self._measured = []
            self._timers[threads].append(self._measured)
        return threads

    def add(self, timer: DeviceTimer) -> None:
        """Adds to the time of the present call, if it is measured."""
        self._measured.append(timer)

    def _choose(self) -> Iterator[tuple[bool, bool]]:
        """For each call, whether it runs in threads, and whether it is measured."""
        while True:
            self.is_comparing = True
            for row in range(self.ROWS):
                yield from [(row % 2 == 1, k > 0) for k in range(self.ROW)]
            self.is_comparing = False
            faster = self._seconds(threads=True) <= self._seconds(threads=False)
            yield from repeat((faster, False), self.INTERVAL)

    def _seconds(self, *, threads: bool) -> float:
        """The median time of a call that was made in threads, or in order."""
        calls, self._timers[threads] = [timers for timers in self._timers[threads] if timers], []
        for timer in [timer for timers in calls for timer in timers]:
            timer.wait()
        return statistics.median([sum([t.seconds for t in timers]) for timers in calls] or [0.0])


def _watch_checkpoint() -> Callable[[], None] | None:
    """Called where a checkpoint begins, outside of backwards too; what it returns, at its end.

    A checkpoint restores random states of the whole process in its backward. If it draws numbers
    where others draw from the same generator meanwhile, it finds other ones than in its forward.
    """
    task = current_participant()
    if task is None or len(task.calls.participants) < 2:
        return None
    calls, device = task.calls, task.device
    shared = [torch.device("cpu")]
    if device.type != "cpu" and [p.device for p in calls.participants].count(device) > 1:
        shared.append(device)
    before = list(map(_random_state, shared))

    def end() -> None:
        for place, state in zip(shared, before, strict=True):
            if not torch.equal(state, _random_state(place)):
                calls.drawn_in_checkpoint = place

    return end


def _random_state(device: torch.device) -> Tensor:
    module: Any = torch if device.type == "cpu" else torch.get_device_module(device)
    state: Tensor = module.get_rng_state()
    return state


def _seed_devices(devices: Sequence[torch.device]) -> None:
    """Gives each device but the root a seed of its own, derived from the root's.

    `torch.manual_seed` gives all of them the same, and with it the same dropout masks.
    """
    generators: list[torch.Generator] = []
    for device in dict.fromkeys(devices):
        if device.type == "cpu":
            generators.append(torch.default_generator)
        elif defaults := getattr(torch.get_device_module(device), "default_generators", None):
            generators.append(defaults[device.index])
    for place, generator in enumerate(generators):
        root = generators[0].initial_seed()
        if place and generator.initial_seed() == root:
            generator.manual_seed(seed_apart(root, place))
