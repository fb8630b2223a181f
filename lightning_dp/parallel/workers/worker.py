"""A worker: the thread in which one replica's calls run."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import torch


class Worker:
    """A thread that runs what is put into its inbox, until None comes."""

    def __init__(self, replica: int, intra_op_threads: int) -> None:
        self.inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.ready = threading.Event()
        self.is_idle = True
        self._intra_op_threads = intra_op_threads
        self.thread = threading.Thread(target=self._loop, name=f"dp-replica-{replica}", daemon=True)
        self.thread.start()

    def _loop(self) -> None:
        torch.get_num_threads()  # a thread's first look replaces what was set before it
        torch.set_num_threads(self._intra_op_threads)
        self.ready.set()
        with contextlib.suppress(KeyboardInterrupt, SystemExit):  # see `left_behind`
            self._work()

    def _work(self) -> None:
        while (work := self.inbox.get()) is not None:
            self.is_idle = False
            work()
            self.is_idle = True
            # The last one holds a batch and a graph, which must not outlive the step.
            del work


def start_workers(devices: Sequence[torch.device]) -> list[Worker]:
    """One for each replica; those on the CPU share its threads."""
    total = torch.get_num_threads()
    on_cpu = sum(device.type == "cpu" for device in devices)
    workers = [Worker(k, max(1, total // max(1, on_cpu))) for k in range(len(devices))]
    for worker in workers:
        worker.ready.wait()
    # A worker's number became the default of threads to come; that remains the caller's.
    torch.set_num_threads(total)
    return workers
