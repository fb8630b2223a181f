"""Apply: one function call per replica, in worker threads or one after another.

Replica k always runs in worker k, a thread that lives as long as the pool. A worker gives each
call the caller's full thread state and brings its result or its exception back.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias

import torch

from lightning_dp.parallel.checks import check_choice
from lightning_dp.parallel.devices import replica_names
from lightning_dp.parallel.errors import add_note
from lightning_dp.parallel.links import Stretch
from lightning_dp.parallel.torch_private import (
    cached_values,
    count_dispatch_modes,
    count_function_modes,
    saved_tensors_functions,
    watch_checkpoints,
)
from lightning_dp.parallel.workers import left_behind
from lightning_dp.parallel.workers.calls import Calls
from lightning_dp.parallel.workers.generators import begin_checkpoint, draw_apart, generators_of
from lightning_dp.parallel.workers.left_behind import ended, leave_behind
from lightning_dp.parallel.workers.participant import Participant, Task
from lightning_dp.parallel.workers.process import watch
from lightning_dp.parallel.workers.thread_state import ThreadState, is_checkpointing
from lightning_dp.parallel.workers.trial import Trial
from lightning_dp.parallel.workers.worker import Worker, start_workers

ExecutorName: TypeAlias = Literal["auto", "threads", "inorder"]
EXECUTORS: tuple[ExecutorName, ...] = ("auto", "threads", "inorder")
SHARED_VALUES = (
    "Expected no torch.nn.utils.parametrize.cached() where replicas run at once or wait for each "
    "other, got one: torch has one cache for all, so a replica would compute with another one's "
    'weights, on their device. Choose executor="inorder", or, where replicas meet in a step '
    "(collectives, synced batch norm, manual optimisation), leave cached() out."
)
REDRAWN = (
    "Expected no random numbers in activation checkpoints (torch.utils.checkpoint) where replicas "
    "run in threads and draw from one generator, that of {device}, got some: they are drawn once "
    "more in the backward, and others have drawn meanwhile, so gradients would be those of other "
    "numbers. "
    'Choose executor="inorder", a dropout of 0, or devices that are distinct.'
)
WHY = {
    "look": "the first call shows whether checkpoints draw random numbers, or compiled code is new",
    "inorder": 'executor="inorder"',
    "deterministic": 'executor="auto" takes them in order where algorithms are deterministic',
    "compiles": "compiled modules are called one at a time",
    "cached": "parametrize.cached() has one cache for all threads",
    "checkpoint": "an activation checkpoint computes again in one order only",
}
"""Why work is done in order, unless that is faster."""


class Executor:
    """Runs the replicas' tasks, one worker for each, and returns the results in their order.

    By `"threads"`, by `"inorder"` (one after another on the calling thread: for a debugger, or to
    repeat a run bit by bit), or by `"auto"`, which measures both on the first calls of each kind of
    work and keeps the faster: that with which the devices are through sooner. Threads win where the
    devices compute, the other way wins where Python is the bottleneck.

    `on_left_behind` is called when a replica was left behind, which may do its work later.
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        how: ExecutorName = "auto",
        on_left_behind: Callable[[], None] = lambda: None,
        names: Sequence[str] | None = None,
    ) -> None:
        check_choice("executor", how, EXECUTORS)
        self._on_left_behind = on_left_behind
        self._devices = list(devices)
        self._names = replica_names(devices) if names is None else names
        self._is_on_cpu = all(device.type == "cpu" for device in devices)
        self._how = how
        self._shares_values = False  # calls have used the one cache of parametrizations
        self._generators: list[torch.Generator] | None = None
        self._redraws = False  # checkpoints draw from a generator that replicas share
        self._looked_at: set[str] = set()  # kinds of work that have run once
        self._workers: list[Worker] = []
        self._trials: defaultdict[tuple[str, int], Trial] = defaultdict(Trial)
        self._latest: dict[str, Trial] = {}
        self._in_threads: dict[str, bool] = {}
        self._why: dict[str, str] = {}  # the latest work of a kind ran so
        watch(self)
        watch_checkpoints(begin_checkpoint)

    def run(
        self,
        kind: str,
        tasks: Sequence[Task],
        *,
        goes_on: bool = False,
        calls: Calls | None = None,
    ) -> list[Any]:
        """Runs all tasks and waits for them.

        The first failed replica's own exception is raised, with a note that says which replica,
        device and samples. No task is running any more when it arrives.

        An interrupt ends the replicas that wait, and is raised when the others have ended, too, or
        after some seconds. A second one is raised at once. Who runs on is named, and its thread is
        left behind.

        Args:
            kind: the name of this kind of work; `"auto"` chooses for each kind on its own.
            tasks: at most one per replica.
            goes_on: whether this is the second half of the latest work of this kind (a step's
                backward after its forward): it runs the same way and counts with it. Changing
                threads in between costs more than either way saves: memory goes back and forth.
            calls: knows what the replicas need if they meet; None if they will not.
        """
        calls = calls or Calls()
        calls.names = self._names
        if not goes_on:
            self.choose(kind, len(tasks))
        if self._generators is None:  # not sooner: they come with the first use of devices
            self._generators = generators_of(self._devices)
        if len(set(map(torch.Generator.initial_seed, self._generators))) < len(self._generators):
            draw_apart(self._generators)
        trial = self._latest.get(kind)
        measured = trial is not None and trial.is_measured
        stretch = Stretch(self._devices) if measured else None
        values = cached_values()
        try:
            calls.begin(tasks, self._thread_state(), self._start)
            if len(tasks) > 1 and self._in_threads[kind]:
                calls.run_in_threads()
            else:
                calls.run_in_order(moves=not self._is_on_cpu)
        except BaseException as interrupt:
            calls.end(interrupt)
            raise
        finally:
            if stuck := calls.unended:
                self._leave(stuck)
            results, failure = calls.close()
            if trial is not None and stretch is not None:
                stretch.end()
                trial.add(stretch)
        if cached_values() is not values and len(tasks) > 1:
            self._shares_values = True
            if self._in_threads[kind] or calls.have_met:
                raise RuntimeError(SHARED_VALUES) from (failure and failure[1])
        if calls.redrawn and len(tasks) > 1:
            self._note_redrawn(kind, calls, failure and failure[1])
        if failure is not None:
            raise _told(calls, *failure)
        return results

    def _note_redrawn(self, kind: str, calls: Calls, cause: BaseException | None) -> None:
        """Checkpoints have drawn random numbers: replicas of one generator take turns now."""
        for device in calls.redrawn:
            if device.type == "cpu" or self._devices.count(device) > 1:
                self._redraws = True
                if self._in_threads[kind]:
                    raise RuntimeError(REDRAWN.format(device=device)) from cause

    def _thread_state(self) -> ThreadState:
        """That of the calling thread, which on the CPU is in no mode as a rule."""
        is_plain = self._is_on_cpu and not (
            torch.is_inference_mode_enabled()
            or torch.is_autocast_enabled("cpu")
            or count_function_modes()
            or count_dispatch_modes()
            or saved_tensors_functions()
        )
        if is_plain:
            return ThreadState(self._devices[0], torch.is_grad_enabled())
        return ThreadState.capture(self._devices)

    def rest(self) -> None:
        """Waits until the workers have let go of their latest calls, just after these ended."""
        marks = [threading.Event() for _ in self._workers]
        for worker, mark in zip(self._workers, marks, strict=True):
            worker.inbox.put(mark.set)
        for mark in marks:
            mark.wait()

    def close(self) -> None:
        """Ends the worker threads; a later `run` starts new ones.

        After some seconds, those that are still at work for somebody are left behind.
        """
        threads = [worker.thread for worker in self.dismiss()]
        if not ended(threads, left_behind.GRACE_SECONDS):
            for thread in threads:
                leave_behind(thread.name, thread)

    def dismiss(self) -> list[Worker]:
        """Lets the workers go, which end when their present work does."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.inbox.put(None)
        return workers

    def _leave(self, stuck: Sequence[Participant]) -> None:
        """A worker that does not end with an interrupted run never gets another call."""
        self._on_left_behind()
        workers = self.dismiss()
        for participant in stuck:
            task = participant.task
            who = participant.name + task.context()
            leave_behind(who, workers[task.replica].thread)

    def choose(self, kind: str, count: int, *, compiles: bool = False) -> bool:
        """Decides whether so many tasks of a kind, and what goes on with them, run in threads.

        Modules that torch.compile may compile leave no choice.
        """
        why: str = self._how
        in_threads = why == "threads"
        saving = None if why == "inorder" else saved_tensors_functions()
        self._latest.pop(kind, None)
        if compiles:
            in_threads, why = False, "compiles"
        elif saving and is_checkpointing(saving):
            # It knows tensors by their order alone, which threads would not repeat.
            in_threads, why = False, "checkpoint"
        elif self._shares_values and why != "inorder":
            in_threads, why = False, "cached"
        elif self._redraws and why != "inorder":
            in_threads, why = False, "checkpoint"
        elif why == "auto" and self._is_to_be_looked_at(kind):
            why = "look"
        elif why == "auto" and torch.are_deterministic_algorithms_enabled():
            why = "deterministic"
        elif why == "auto":
            trial = self._latest[kind] = self._trials[kind, count]
            if next(trial.rest, None) is None:
                trial.begin()
            in_threads = trial.threads
        self._in_threads[kind], self._why[kind] = in_threads, why
        return in_threads

    def _is_to_be_looked_at(self, kind: str) -> bool:
        """Whether its first call may show what no call in threads must do."""
        may = torch.is_grad_enabled() or not self._is_on_cpu  # checkpoints draw, GPUs make graphs
        if not may or len(set(self._devices)) == len(self._devices) or kind in self._looked_at:
            return False
        self._looked_at.add(kind)
        return True

    def is_in_threads(self, kind: str) -> bool:
        """Whether the latest work of a kind ran in threads."""
        return self._in_threads.get(kind, True)

    def why_in_order(self, kind: str) -> str:
        """Why work of a kind is done in order, for people."""
        if (why := self._why[kind]) in WHY:
            return WHY[why]
        trials = [trial for (own, _), trial in self._trials.items() if own == kind]
        seconds = max(trials, key=lambda trial: trial.count).medians
        if len(seconds) < 2 or seconds[True] <= seconds[False]:
            return 'executor="auto" was still measuring both ways'
        part = seconds[False] / seconds[True]
        return f'executor="auto" measured: in turns they take {part:.0%} of the time in threads'

    def spreading(self, kind: str) -> Callable[[Sequence[Callable[[], None]]], object] | None:
        """Makes calls in the workers, one in each; None if the latest work of a kind was in order.

        They go on with that work, see `run`.
        """
        return partial(self._spread, kind) if self._in_threads[kind] else None

    def _spread(self, kind: str, calls: Sequence[Callable[[], None]]) -> None:
        tasks = [Task(k, self._devices[k], call) for k, call in enumerate(calls)]
        self.run(kind, tasks, goes_on=True)

    def is_settled(self, kind: str | None = None) -> bool:
        """Whether the latest work of a kind, or of all, was done as it will be from now on."""
        latest = self._latest
        own = latest.values() if kind is None else [latest[kind]] if kind in latest else []
        return all([trial.has_ended for trial in own])

    def _start(self, participant: Participant) -> None:
        if not self._workers:
            self._workers = start_workers(self._devices)
        work = partial(participant.calls.work, participant)
        self._workers[participant.task.replica].inbox.put(work)


def _told(calls: Calls, task: Task | None, error: BaseException) -> BaseException:
    """An error of a task, with a note that says whose."""
    if task is not None:
        who = calls.who(task.replica) + task.context()
        add_note(error, f"[in {who}{task.cause(error)}]")
    return error
