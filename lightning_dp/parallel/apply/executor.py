"""Executor: makes one call per replica, in worker threads or one after another."""

from __future__ import annotations

import gc
import statistics
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
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
REASONS = {
    "first": "the first call shows what must not run in threads",
    "inorder": 'executor="inorder"',
    "deterministic": 'executor="auto" takes them in order where algorithms are deterministic',
    "compiles": "compiled modules are called one at a time",
    "cached": "parametrize.cached() has one cache for all threads",
    "checkpoint": "an activation checkpoint recomputes in the order of the forward",
}
"""Why calls are made in order, unless that is faster."""

# [Note: no garbage collection while replicas run in threads]
# Before Python 3.12 any new object may start a collection, also where torch makes one while it
# holds the lock of a random generator (`get_rng_state`, in activation checkpoints). If that frees
# a tensor, other threads run; one that waits for the same lock keeps the interpreter's, for ever.


class Executor:
    """Makes the calls of all replicas, and returns their results in order.

    In `"threads"`, where replica k always runs in worker k; `"inorder"`, one after another on the
    calling thread, for a debugger or to repeat a run bit by bit; or `"auto"`, which measures both
    for each kind of call and keeps the faster: threads win where the devices compute, in order
    wins where Python is the bottleneck.

    Args:
        devices: the replicas' devices, the root device first.
        how: one of these.
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
        self._devices, self._how, self._timeout = list(devices), how, timeout
        self._on_left_behind = on_left_behind
        self._names = replica_names(devices) if names is None else names
        self._is_shared = len(set(devices)) < len(self._devices)
        self._is_on_one_device = len(set(devices)) == 1
        self._is_on_cpu = all(device.type == "cpu" for device in devices)
        self._plain_states = [ThreadState(self._devices[0], grad) for grad in (False, True)]
        self._always_in_order = ""  # the reason, see REASONS
        self._reasons: dict[str, str] = {}  # of the latest call of each kind: "threads", or why not
        self._trials: defaultdict[tuple[str, int], Trial] = defaultdict(Trial)
        self._latest: dict[str, Trial] = {}
        self._workers: list[Worker] = []
        worker.executors.add(self)
        watch_checkpoints(_watch_checkpoint)

    def choose(self, kind: str, count: int, *, compiles: bool = False) -> bool:
        """Chooses threads or in order for `count` calls of a kind, and for their backward.

        Modules that torch.compile may compile leave no choice.
        """
        reason = self._always_in_order or self._how
        self._latest.pop(kind, None)
        if compiles:
            reason = "compiles"
        elif reason != "inorder" and has_modes() and is_checkpointing(saved_tensors_functions()):
            reason = "checkpoint"  # its saved tensors are known by their order
        elif reason == "auto" and self._is_shared and kind not in self._reasons:
            reason = "first"
        elif reason == "auto" and torch.are_deterministic_algorithms_enabled():
            reason = "deterministic"
        elif reason == "auto":
            trial = self._latest[kind] = self._trials[kind, count]
            reason = "threads" if trial.begin() else "auto"
        self._reasons[kind] = reason
        return reason == "threads"

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
        in_threads = len(tasks) > 1 and self._reasons[kind] == "threads"
        trial, cached = self._latest.get(kind), cached_values()
        measured = None if trial is None or not trial.is_measured else DeviceTimer(self._devices)
        is_plain = self._is_on_cpu and not (
            torch.is_inference_mode_enabled() or torch.is_autocast_enabled("cpu") or has_modes()
        )
        plain = self._plain_states[torch.is_grad_enabled()]
        state = plain if is_plain else ThreadState.capture(self._devices)
        collects = in_threads and sys.version_info < (3, 12) and gc.isenabled()  # see the note
        if collects:
            gc.disable()
        try:
            calls.run(tasks, state, self._workers, self._start_workers, in_threads=in_threads)
        except BaseException as interrupt:
            calls.end(interrupt)
            raise
        finally:
            if collects:
                gc.enable()
            if calls.broken is not None and (unended := calls.unended()):
                self._leave_behind(unended)
            results, failed, error = calls.close()
            if trial is not None and measured is not None:
                measured.end()
                trial.add(measured)
        if calls.drawn_in_checkpoint is not None and len(tasks) > 1:
            self._always_in_order = "checkpoint"
            if in_threads:
                raise RuntimeError(CHECKPOINT.format(device=calls.drawn_in_checkpoint)) from error
        if cached_values() is not cached and len(tasks) > 1:
            self._always_in_order = "cached"
            if in_threads or calls.have_met:
                raise RuntimeError(CACHED) from error
        if error is not None:
            if failed is not None:
                add_note(error, f"[in {failed.name}{failed.context()}{failed.cause(error)}]")
            raise error
        return results

    def _start_workers(self) -> None:
        self._workers[:] = start_workers(self._devices)

    def _leave_behind(self, tasks: Sequence[Task]) -> None:
        """Gives up workers that did not end: later calls get new ones."""
        self._on_left_behind()
        workers = self.dismiss()
        for task in tasks:
            workers[task.replica].leave_behind(task.name + task.context())

    def parallel_for(self, kind: str) -> Callable[[Sequence[Callable[[], None]]], object] | None:
        """A function that makes one call per worker; None if this kind's latest ran in order."""
        return partial(self._parallel_for, kind) if self._reasons[kind] == "threads" else None

    def _parallel_for(self, kind: str, calls: Sequence[Callable[[], None]]) -> None:
        tasks = [Task(k, self._devices[k], call) for k, call in enumerate(calls)]
        self.run(kind, tasks, continues_previous=True)

    def is_in_threads(self, kind: str) -> bool:
        """Whether the latest calls of a kind ran in threads."""
        return self._reasons.get(kind, "threads") == "threads"

    def is_settled(self, kind: str | None = None) -> bool:
        """Whether calls of a kind, or of all, run as they will from now on."""
        return all([t.has_ended for own, t in self._latest.items() if kind in (None, own)])

    def why_in_order(self, kind: str) -> str:
        """Why calls of a kind are made in order."""
        if (reason := self._reasons[kind]) in REASONS:
            return REASONS[reason]
        seconds = self._latest[kind].medians
        if len(seconds) < 2 or seconds[True] <= seconds[False]:
            return 'executor="auto" was still measuring both ways'
        part = seconds[False] / seconds[True]
        return f'executor="auto" measured: in turns they take {part:.0%} of the time in threads'

    def rest(self) -> None:
        """Waits until the workers no longer refer to their latest calls."""
        marks = [threading.Event() for _ in self._workers]
        for own, mark in zip(self._workers, marks, strict=True):
            own.inbox.put(mark.set)
        for mark in marks:
            mark.wait()

    def dismiss(self) -> list[Worker]:
        """Lets the workers go; each ends after its present call."""
        workers, self._workers = self._workers, []
        for own in workers:
            own.inbox.put(None)
        return workers

    def close(self) -> None:
        """Ends the workers; a later `run` starts new ones."""
        workers = self.dismiss()
        if not have_ended(workers, worker.GRACE_SECONDS):
            for own in workers:
                own.leave_behind()


class Trial:
    """Chooses threads or in order for one kind of call, by the medians of recent times.

    Both take turns at first, a row of calls each; the first call of a row does not count, since it
    starts threads and fills caches. Then the faster way runs, and the other one is measured again
    at growing intervals. Times are those of the devices, read when these are through.
    """

    ROW, ROWS = 4, 4  # calls in a row, and rows at first
    PROBE = 3  # calls of the slower way in a row
    INTERVALS = 64, 256, 1024  # calls from one probe to the next
    KEPT = 6  # times per way

    def __init__(self) -> None:
        self.is_measured = False
        self.has_ended = False  # both ways are known: from here on the slower one is only probed
        self.medians: dict[bool, float] = {}  # seconds of a call in threads (True) and in order
        self._choices = self._choose()
        self._seconds = {way: deque[float](maxlen=self.KEPT) for way in (True, False)}
        self._pending: deque[tuple[bool, list[DeviceTimer]]] = deque(maxlen=2 * self.KEPT)

    def begin(self) -> bool:
        """Chooses for the next call; returns whether it runs in threads."""
        if self._pending:
            self._read()
        threads, self.is_measured = next(self._choices)
        if self.is_measured:
            self._pending.append((threads, []))
        return threads

    def add(self, stretch: DeviceTimer) -> None:
        """Adds to the time of the present call, if it is measured."""
        self._pending[-1][1].append(stretch)

    def _choose(self) -> Iterator[tuple[bool, bool]]:
        """For each call, whether it runs in threads, and whether it is measured."""
        row = 0
        while row < self.ROWS or len(self.medians) < 2:
            yield from [(row % 2 == 0, k > 0) for k in range(self.ROW)]
            row += 1
        self.has_ended, intervals, faster = True, iter(self.INTERVALS), self._faster()
        interval = next(intervals)
        while True:
            for k in range(interval):
                yield self._faster(), k >= interval - self.KEPT
            probed = not self._faster()
            self._seconds[probed].clear()
            yield from [(probed, k > 0) for k in range(self.PROBE)]
            if self._faster() != faster:
                faster, intervals = self._faster(), iter(self.INTERVALS)
            interval = next(intervals, interval)

    def _faster(self) -> bool:
        return self.medians[True] <= self.medians[False]

    def _read(self) -> None:
        """Takes the times of the calls that the devices are through with."""
        while self._pending and all([stretch.is_over() for stretch in self._pending[0][1]]):
            way, stretches = self._pending.popleft()
            if stretches:  # else the call was not made
                self._seconds[way].append(sum([stretch.seconds for stretch in stretches]))
                self.medians[way] = statistics.median(self._seconds[way])


def _watch_checkpoint() -> Callable[[], None] | None:
    """Notes, until what it returns is called, whether a replica's checkpoint draws numbers.

    Only from a generator that other replicas draw from, too: the recomputation would get others.
    """
    task = current_participant()
    if task is None or len(task.calls.participants) < 2:
        return None
    calls, device = task.calls, task.device
    shared = [torch.device("cpu")]
    if device.type != "cpu" and [own.device for own in calls.participants].count(device) > 1:
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
    root = None
    for place, device in enumerate(dict.fromkeys(devices)):
        module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        if module is None:
            generator = torch.default_generator
        elif hasattr(module, "default_generators"):
            generator = module.default_generators[device.index]
        else:
            continue
        root = root or generator
        if place and generator.initial_seed() == root.initial_seed():
            generator.manual_seed(seed_apart(root.initial_seed(), place))
