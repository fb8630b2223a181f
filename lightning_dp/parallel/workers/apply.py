"""Apply: one function call per replica, in worker threads or one after another.

Replica k always runs in worker k, a thread that lives as long as the pool. A worker gives each
call the caller's full thread state and brings its result or its exception back.
"""

from __future__ import annotations

import contextvars
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any, Literal, TypeAlias

import torch

from lightning_dp.parallel.checks import check_choice
from lightning_dp.parallel.workers.participant import Participant, participating
from lightning_dp.parallel.workers.rendezvous import Rendezvous
from lightning_dp.parallel.workers.thread_state import ThreadState

ExecutorName: TypeAlias = Literal["auto", "threads", "inorder"]
EXECUTORS: tuple[ExecutorName, ...] = ("auto", "threads", "inorder")


@dataclass
class Task:
    """A call for one replica.

    Attributes:
        replica: the number of the replica.
        device: its device.
        call: what to run; takes nothing.
        context: completes the sentence "in replica 2 on cuda:1, ..." in an error.
        seconds: how long the call worked, once it has run; waiting for others is left out.
    """

    replica: int
    device: torch.device
    call: Callable[[], Any]
    context: str = ""
    seconds: float = field(default=0.0, init=False)

    def run(self, participant: Participant) -> Any:
        """Makes the call and times it."""
        start = time.perf_counter()
        try:
            return self.call()
        finally:
            self.seconds = time.perf_counter() - start - participant.waited


class Executor:
    """Runs the replicas' tasks and returns their results in the order of the tasks.

    Args:
        devices: one device per replica; the pool has one worker for each.
        how: `"threads"`, `"inorder"` (one after another on the calling thread: for a debugger, or
            to repeat a run bit by bit), or `"auto"`, which measures both on the first calls of
            each kind of work and keeps the faster. Threads win where the devices compute, the
            other way wins where Python is the bottleneck.

    Raises:
        ValueError: unknown `how`.
    """

    def __init__(self, devices: Sequence[torch.device], how: ExecutorName = "auto") -> None:
        check_choice("executor", how, EXECUTORS)
        self._devices = list(devices)
        self._how = how
        self._workers: list[_Worker] = []
        self._trials: dict[tuple[str, int], _Trial] = {}
        self._latest: dict[str, _Trial] = {}

    def run(
        self,
        kind: str,
        tasks: Sequence[Task],
        *,
        goes_on: bool = False,
        rendezvous: Rendezvous | None = None,
    ) -> list[Any]:
        """Runs all tasks and waits for them.

        Args:
            kind: the name of this kind of work; `"auto"` chooses for each kind on its own.
            tasks: at most one per replica.
            goes_on: whether this is the second half of the latest work of this kind (a step's
                backward after its forward): it runs the same way and counts with it. Changing
                threads in between costs more than either way saves: memory goes back and forth.
            rendezvous: where the replicas meet if their calls ask for it.

        Raises:
            Exception: the first failed replica's own exception, with a note that says which
                replica, device and samples. No task is running any more when it arrives.
        """
        rendezvous = rendezvous or Rendezvous()
        trial = self._trial(kind, len(tasks), goes_on)
        in_threads = self._how == "threads" if trial is None else trial.threads
        in_threads &= not _is_checkpointing()
        start = time.perf_counter()
        try:
            return (self._in_threads if in_threads else self._in_order)(tasks, rendezvous)
        finally:
            rendezvous.close()
            if trial is not None:
                trial.add(time.perf_counter() - start)

    def rest(self) -> None:
        """Waits until the workers have let go of their latest calls, just after these ended."""
        marks = [threading.Event() for _ in self._workers]
        for worker, mark in zip(self._workers, marks, strict=True):
            worker.inbox.put(mark.set)
        for mark in marks:
            mark.wait()

    def close(self) -> None:
        """Ends the worker threads; a later `run` starts new ones."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.inbox.put(None)
        for worker in workers:
            worker.thread.join()

    def _trial(self, kind: str, count: int, goes_on: bool) -> _Trial | None:
        """The trial that decides; None if there is nothing to decide."""
        if self._how != "auto" or torch.are_deterministic_algorithms_enabled():
            return None
        if not goes_on:
            self._latest[kind] = self._trials.setdefault((kind, count), _Trial())
            self._latest[kind].begin()
        return self._latest[kind]

    def _in_order(self, tasks: Sequence[Task], rendezvous: Rendezvous) -> list[Any]:
        """On this thread; if the first task comes to a rendezvous, the others in their workers."""
        rendezvous.begin([(task.replica, task.device) for task in tasks], one_by_one=True)
        state = ThreadState.capture(self._devices)
        self._prepare(tasks, rendezvous, state)
        # Replicas that are all on the CPU are where the caller is.
        on_cpu = all(device.type == "cpu" for device in self._devices)
        for participant, task in zip(rendezvous.participants, tasks, strict=True):
            if not participant.has_begun and not rendezvous.has_failed:
                with nullcontext() if on_cpu else state.moved_to(task.device):
                    rendezvous.run_here(participant, partial(task.run, participant))
        return _outcome(tasks, rendezvous)

    def _in_threads(self, tasks: Sequence[Task], rendezvous: Rendezvous) -> list[Any]:
        if len(tasks) == 1:
            return self._in_order(tasks, rendezvous)
        rendezvous.begin([(task.replica, task.device) for task in tasks], one_by_one=False)
        self._prepare(tasks, rendezvous, ThreadState.capture(self._devices))
        return _outcome(tasks, rendezvous)

    def _prepare(self, tasks: Sequence[Task], rendezvous: Rendezvous, state: ThreadState) -> None:
        for participant, task in zip(rendezvous.participants, tasks, strict=True):
            rendezvous.can_start(participant, partial(self._start, _Job(task, participant, state)))

    def _start(self, job: _Job) -> None:
        if not self._workers:
            self._workers = _start_workers(self._devices)
        self._workers[job.task.replica].inbox.put(job)


class _Job:
    """A task on its way through a worker."""

    def __init__(self, task: Task, participant: Participant, state: ThreadState) -> None:
        self.task = task
        self._participant = participant
        self._state = state
        self._context = contextvars.copy_context()

    def __call__(self) -> None:
        self._participant.run(partial(self._context.run, self._run))

    def _run(self) -> Any:
        with self._state.entered(self.task.device), participating(self._participant):
            return self.task.run(self._participant)


class _Worker:
    """A thread that runs what is put into its inbox, until None comes."""

    def __init__(self, replica: int, intra_op_threads: int) -> None:
        self.inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.ready = threading.Event()
        self._intra_op_threads = intra_op_threads
        self.thread = threading.Thread(target=self._loop, name=f"dp-replica-{replica}", daemon=True)
        self.thread.start()

    def _loop(self) -> None:
        torch.get_num_threads()  # a thread's first look replaces what was set before it
        torch.set_num_threads(self._intra_op_threads)
        self.ready.set()
        while (job := self.inbox.get()) is not None:
            job()
            # The last job holds a batch and a graph, which must not outlive the step.
            del job


class _Trial:
    """Decides between threads and in-order runs by the median of their recent times.

    Both take turns at first. Then the faster runs, and now and then the other once more: a machine
    may be busy during the first steps, or become so later.

    Attributes:
        threads: how the present piece of work is to run.
    """

    ROUNDS = 5  # of each at first, and what the medians are taken of
    PROBE_EVERY = 64  # pieces of work; at twice the time a probe costs under 2 %

    def __init__(self) -> None:
        self.threads = True
        self._count = -2  # the first piece of each way is not counted: it starts caches
        self._seconds: dict[bool, deque[float]] = {
            way: deque(maxlen=self.ROUNDS) for way in (True, False)
        }

    def begin(self) -> None:
        """Starts another piece of work."""
        self._count += 1
        faster = min((True, False), key=lambda way: statistics.median(self._seconds[way] or [0]))
        if self._count < 2 * self.ROUNDS:
            self.threads = self._count % 2 == 1
        else:
            self.threads = faster if self._count % self.PROBE_EVERY else not faster
        if self._count > 0:
            self._seconds[self.threads].append(0.0)

    def add(self, seconds: float) -> None:
        """Adds to the time of the present piece of work."""
        if self._seconds[self.threads]:
            self._seconds[self.threads][-1] += seconds


def _is_checkpointing() -> bool:
    """Whether the caller's backward will do this work again (`torch.utils.checkpoint`).

    It knows the tensors that it saves by their order alone, which threads would not repeat.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"


def _start_workers(devices: Sequence[torch.device]) -> list[_Worker]:
    total = torch.get_num_threads()
    on_cpu = sum(device.type == "cpu" for device in devices)
    workers = [_Worker(k, max(1, total // max(1, on_cpu))) for k in range(len(devices))]
    for worker in workers:
        worker.ready.wait()
    # A worker's number became the default of threads to come; that remains the caller's.
    torch.set_num_threads(total)
    return workers


def _outcome(tasks: Sequence[Task], rendezvous: Rendezvous) -> list[Any]:
    """Lets the tasks come to their ends; their results, or the error."""
    try:
        rendezvous.serve()
    finally:
        results, failure = rendezvous.close()
    if failure is not None:
        position, error = failure
        raise error if position is None else _with_note(error, tasks[position])
    return results


def _with_note(error: BaseException, task: Task) -> BaseException:
    note = f"[in replica {task.replica} on {task.device}{task.context}]"
    if hasattr(error, "add_note"):
        error.add_note(note)
    elif len(error.args) == 1 and isinstance(error.args[0], str):  # Python 3.10
        error.args = (f"{error.args[0]}\n{note}",)
    return error
