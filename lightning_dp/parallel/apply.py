"""Apply: one function call per replica, in worker threads or one after another.

Replica k always runs in worker k, a thread that lives as long as the pool. A worker gives each
call the caller's full thread state and brings its result or its exception back.
"""

from __future__ import annotations

import contextlib
import contextvars
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Literal, TypeAlias

import torch

from lightning_dp.parallel.checks import check_choice
from lightning_dp.parallel.thread_state import ThreadState

ExecutorName: TypeAlias = Literal["auto", "threads", "inorder"]
EXECUTORS: tuple[ExecutorName, ...] = ("auto", "threads", "inorder")

Outcomes: TypeAlias = dict[int, tuple[Any, BaseException | None]]
"""Of each task, by its position, the result or the error."""


@dataclass
class Task:
    """A call for one replica.

    Attributes:
        replica: the number of the replica.
        device: its device.
        call: what to run; takes nothing.
        context: completes the sentence "in replica 2 on cuda:1, ..." in an error.
        seconds: how long the call took, once it has run.
    """

    replica: int
    device: torch.device
    call: Callable[[], Any]
    context: str = ""
    seconds: float = field(default=0.0, init=False)

    def run(self) -> Any:
        """Makes the call and times it."""
        start = time.perf_counter()
        try:
            return self.call()
        finally:
            self.seconds = time.perf_counter() - start


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

    def run(self, kind: str, tasks: Sequence[Task], *, goes_on: bool = False) -> list[Any]:
        """Runs all tasks and waits for them.

        Args:
            kind: the name of this kind of work; `"auto"` chooses for each kind on its own.
            tasks: at most one per replica.
            goes_on: whether this is the second half of the latest work of this kind (a step's
                backward after its forward): it runs the same way and counts with it. Changing
                threads in between costs more than either way saves: memory goes back and forth.

        Raises:
            Exception: the first failed replica's own exception, with a note that says which
                replica, device and samples. No task is running any more when it arrives.
        """
        trial = self._trial(kind, len(tasks), goes_on)
        in_threads = self._how == "threads" if trial is None else trial.threads
        in_threads &= not _is_checkpointing()
        start = time.perf_counter()
        try:
            return (self._in_threads if in_threads else self._in_order)(tasks)
        finally:
            if trial is not None:
                trial.add(time.perf_counter() - start)

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

    def _in_order(self, tasks: Sequence[Task]) -> list[Any]:
        results = []
        # Replicas that are all on the CPU are where the caller is.
        on_cpu = all(device.type == "cpu" for device in self._devices)
        state = None if on_cpu else ThreadState.capture(self._devices)
        for task in tasks:
            try:
                with nullcontext() if state is None else state.moved_to(task.device):
                    results.append(task.run())
            except Exception as error:
                raise _with_note(error, task)  # noqa: B904  # it is the same exception
        return results

    def _in_threads(self, tasks: Sequence[Task]) -> list[Any]:
        if len(tasks) == 1:
            return self._in_order(tasks)
        if not self._workers:
            self._workers = _start_workers(self._devices)
        outcomes: Outcomes = {}
        done: SimpleQueue[None] = SimpleQueue()
        state = ThreadState.capture(self._devices)
        try:
            for i, task in enumerate(tasks):
                self._workers[task.replica].inbox.put(_Job(i, task, state, outcomes, done))
            # What has happened is not in the news itself: an interrupt may come when one has been
            # taken and not yet been looked at.
            while len(outcomes) < len(tasks):
                with contextlib.suppress(Empty):  # on Windows a lock does not let Ctrl-C through
                    done.get(timeout=0.5)
        except BaseException:
            self._finish()
            raise
        for i, task in enumerate(tasks):
            error = outcomes[i][1]
            if error is not None:
                raise _with_note(error, task)
        return [outcomes[i][0] for i in range(len(tasks))]

    def _finish(self) -> None:
        """Waits, after an interrupt, until no task is using the module any more.

        Whether the interrupt came before or after a task was handed out cannot be told; but what
        comes last into an inbox is run last. A second interrupt ends the wait at once.
        """
        ends = [threading.Event() for _ in self._workers]
        for worker, end in zip(self._workers, ends, strict=True):
            worker.inbox.put(end.set)
        for end in ends:
            while not end.wait(timeout=0.5):
                pass


class _Job:
    """A task on its way through a worker."""

    def __init__(
        self,
        position: int,
        task: Task,
        state: ThreadState,
        outcomes: Outcomes,
        done: SimpleQueue[None],
    ) -> None:
        self._position = position
        self._task = task
        self._state = state
        self._context = contextvars.copy_context()
        self._outcomes = outcomes
        self._done = done

    def __call__(self) -> None:
        try:
            outcome = (self._context.run(self._run), None)
        except BaseException as error:  # it is raised again by the thread that waits
            self._outcomes[self._position] = (None, error)
        else:
            self._outcomes[self._position] = outcome
        self._done.put(None)

    def _run(self) -> Any:
        with self._state.entered(self._task.device):
            return self._task.run()


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


def _with_note(error: BaseException, task: Task) -> BaseException:
    note = f"[in replica {task.replica} on {task.device}{task.context}]"
    if hasattr(error, "add_note"):
        error.add_note(note)
    elif len(error.args) == 1 and isinstance(error.args[0], str):  # Python 3.10
        error.args = (f"{error.args[0]}\n{note}",)
    return error
