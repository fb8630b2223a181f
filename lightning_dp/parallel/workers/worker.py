"""A worker: the thread in which one replica's calls run."""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import TypeAlias

import torch

from lightning_dp.parallel.contexts import Lasting
from lightning_dp.parallel.torch_private import renew_engine
from lightning_dp.parallel.workers.cuda import enter_context, load_linear_algebra
from lightning_dp.parallel.workers.forward_levels import NAME, refuse_levels_in_workers

Inbox: TypeAlias = SimpleQueue[Callable[[], None] | None]


class Worker:
    """A thread that runs what is put into its inbox, until None comes.

    It comes at the latest when nobody knows the worker any more: an interrupt may keep those who
    start or end workers from telling.
    """

    def __init__(self, replica: int, device: torch.device, intra_op_threads: int) -> None:
        self.inbox: Inbox = SimpleQueue()
        self.ready = threading.Event()
        weakref.finalize(self, self.inbox.put, None)
        task = partial(_live, self.inbox, self.ready, device, intra_op_threads)
        self.thread = threading.Thread(target=task, name=f"{NAME}{replica}", daemon=True)
        self.thread.start()

    @property
    def is_at_work(self) -> bool:
        """Whether its thread is anywhere but at its inbox."""
        frame = sys._current_frames().get(self.thread.ident or 0)
        return frame is not None and frame.f_code is not _live.__code__


def _live(
    inbox: Inbox, ready: threading.Event, device: torch.device, intra_op_threads: int
) -> None:
    """What a worker's thread does, which must not know the worker."""
    torch.get_num_threads()  # a thread's first look replaces what was set before it
    torch.set_num_threads(intra_op_threads)
    ready.set()
    enter_context(device)
    with contextlib.suppress(KeyboardInterrupt, SystemExit):  # see `left_behind`
        while (work := inbox.get()) is not None:
            work()
            # The last one holds a batch and a graph, which must not outlive the step.
            del work


def start_workers(devices: Sequence[torch.device]) -> list[Worker]:
    """One for each replica; those on the CPU share its threads."""
    on_cpu = sum(device.type == "cpu" for device in devices)
    each = max(1, torch.get_num_threads() // max(1, on_cpu))
    refuse_levels_in_workers()
    renew_engine()  # in a forked child, where the workers' first forwards would do it at once
    load_linear_algebra(devices)
    starting = _Starting()
    with starting:
        for k, device in enumerate(devices):
            starting.workers.append(Worker(k, device, each))
    return starting.workers


class _Starting(Lasting):
    """A worker's number of threads becomes the default of threads to come; the caller's remains."""

    def __init__(self) -> None:
        self.workers: list[Worker] = []
        self._threads = torch.get_num_threads()

    def begin(self) -> None:
        """Workers may be added."""

    def end(self) -> None:
        """All have set their numbers."""
        for worker in self.workers:
            worker.ready.wait()
        torch.set_num_threads(self._threads)
