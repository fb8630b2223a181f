"""Apply: one function call per replica, in worker threads or one after another.

Replica k always runs in worker k, a thread that lives as long as the pool. A worker gives each
call the caller's full thread state and brings its result or its exception back.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, Literal, TypeAlias

import torch

from lightning_dp.parallel.checks import check_choice
from lightning_dp.parallel.torch_private import saved_tensors_functions
from lightning_dp.parallel.workers.calls import Calls
from lightning_dp.parallel.workers.participant import Participant, Task
from lightning_dp.parallel.workers.thread_state import ThreadState

ExecutorName: TypeAlias = Literal["auto", "threads", "inorder"]
EXECUTORS: tuple[ExecutorName, ...] = ("auto", "threads", "inorder")


class Executor:
    """Runs the replicas' tasks, one worker for each, and returns the results in their order.

    By `"threads"`, by `"inorder"` (one after another on the calling thread: for a debugger, or to
    repeat a run bit by bit), or by `"auto"`, which measures both on the first calls of each kind of
    work and keeps the faster. Threads win where the devices compute, the other way wins where
    Python is the bottleneck.
    """

    def __init__(self, devices: Sequence[torch.device], how: ExecutorName = "auto") -> None:
        check_choice("executor", how, EXECUTORS)
        self._devices = list(devices)
        self._is_on_cpu = all(device.type == "cpu" for device in devices)
        self._how = how
        self._workers: list[_Worker] = []
        self._trials: defaultdict[tuple[str, int], _Trial] = defaultdict(_Trial)
        self._latest: dict[str, _Trial] = {}
        self._in_threads: dict[str, bool] = {}

    def run(
        self,
        kind: str,
        tasks: Sequence[Task],
        *,
        goes_on: bool = False,
        calls: Calls | None = None,
    ) -> list[Any]:
        """Runs all tasks and waits for them.

        An interrupt ends the replicas that wait, and is raised when the others have ended, too. A
        second one is raised at once.

        The first failed replica's own exception is raised, with a note that says which replica,
        device and samples. No task is running any more when it arrives.

        Args:
            kind: the name of this kind of work; `"auto"` chooses for each kind on its own.
            tasks: at most one per replica.
            goes_on: whether this is the second half of the latest work of this kind (a step's
                backward after its forward): it runs the same way and counts with it. Changing
                threads in between costs more than either way saves: memory goes back and forth.
            calls: knows what the replicas need if they meet; None if they will not.
        """
        calls = calls or Calls()
        if not goes_on:
            self.choose(kind, len(tasks))
        trial = self._latest.get(kind)
        start = time.perf_counter()
        try:
            calls.begin(tasks, ThreadState.capture(self._devices), self._start)
            if len(tasks) > 1 and self._in_threads[kind]:
                calls.run_in_threads()
            else:
                calls.run_in_order(moves=not self._is_on_cpu)
        except BaseException as interrupt:
            calls.end(interrupt)
            raise
        finally:
            results, failure = calls.close()
            if trial is not None:
                trial.add(time.perf_counter() - start)
        if failure is not None:
            task, error = failure
            raise error if task is None else _with_note(error, task)
        return results

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

    def choose(self, kind: str, count: int, *, in_order: bool = False) -> bool:
        """Decides whether so many tasks of a kind, and what goes on with them, run in threads.

        `in_order` leaves no choice.
        """
        in_threads = self._how == "threads"
        self._latest.pop(kind, None)
        if in_order:
            in_threads = False
        elif self._how == "auto" and not torch.are_deterministic_algorithms_enabled():
            trial = self._latest[kind] = self._trials[kind, count]
            trial.begin()
            in_threads = trial.threads
        self._in_threads[kind] = in_threads and not _is_checkpointing()
        return self._in_threads[kind]

    def _start(self, participant: Participant) -> None:
        if not self._workers:
            self._workers = _start_workers(self._devices)
        work = partial(participant.calls.work, participant)
        self._workers[participant.task.replica].inbox.put(work)


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
        while (work := self.inbox.get()) is not None:
            work()
            # The last one holds a batch and a graph, which must not outlive the step.
            del work


class _Trial:
    """Decides between threads and in-order runs by the median of their recent times.

    Both take turns at first. Then the faster runs, and now and then the other once more: a machine
    may be busy during the first steps, or become so later.
    """

    ROUNDS = 5  # of each at first, and what the medians are taken of
    PROBE_EVERY = 64  # pieces of work; at twice the time a probe costs under 2 %

    def __init__(self) -> None:
        self.threads = True  # how the present piece of work is to run
        self._count = -2  # the first piece of each way is not counted: it starts caches
        self._seconds = {way: deque[float](maxlen=self.ROUNDS) for way in (True, False)}

    def begin(self) -> None:
        """Starts another piece of work."""
        self._count += 1
        if self._count < 2 * self.ROUNDS:
            self.threads = self._count % 2 == 1
        else:
            in_threads, in_order = map(statistics.median, self._seconds.values())
            is_probe = self._count % self.PROBE_EVERY == 0
            self.threads = (in_threads <= in_order) != is_probe
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
    hooks = saved_tensors_functions()
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
    note = f"[in replica {task.replica} on {task.device}{task.context()}{task.cause(error)}]"
    if hasattr(error, "add_note"):
        error.add_note(note)
    elif len(error.args) == 1 and isinstance(error.args[0], str):  # Python 3.10
        error.args = (f"{error.args[0]}\n{note}",)
    return error
