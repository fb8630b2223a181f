"""A worker: a daemon thread with an inbox, in which all calls of one replica run.

It ends when its executor closes or is garbage collected, or when the process ends.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Sequence
from queue import SimpleQueue
from typing import Any

import torch

from lightning_dp.parallel.torch_private import check_dual_levels, renew_engine

log = logging.getLogger("lightning_dp")

NAME = "dp-replica-"
GRACE_SECONDS = 5.0
"""How long replicas may run on after an interrupt, a timeout or `close`."""


class Worker:
    """Runs the calls in its inbox, until None comes."""

    def __init__(self, replica: int, device: torch.device, num_threads: int) -> None:
        self.inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.ready = threading.Event()
        weakref.finalize(self, self.inbox.put, None)  # so the thread must not refer to the worker
        args = (self.inbox, self.ready, device, num_threads)
        name = f"{NAME}{replica}"
        self.thread = threading.Thread(target=_live, args=args, name=name, daemon=True)
        self.thread.start()
        _workers.add(self)

    def leave_behind(self, who: str = "") -> None:
        """Names a replica whose thread does not end; interrupts it at its next line of Python."""
        if self.thread.is_alive():
            frame = sys._current_frames().get(self.thread.ident or 0)
            log.warning(
                "Expected %s to end within %g seconds; its thread is left behind, and ends when "
                "the line ends that it is at. Give what waits there a timeout.\n%s",
                who or self.thread.name,
                GRACE_SECONDS,
                "".join(traceback.format_stack(frame)),
            )
            self.interrupt(KeyboardInterrupt)

    def interrupt(self, error: type[BaseException]) -> None:
        """Raises an error in the thread as soon as it runs a line of Python."""
        if self.thread.is_alive():
            ident = ctypes.c_ulong(self.thread.ident or 0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(error))


def _live(inbox: Any, ready: threading.Event, device: torch.device, num_threads: int) -> None:
    torch.get_num_threads()  # a thread's first look at the number would replace it
    torch.set_num_threads(num_threads)
    ready.set()
    if device.type == "cuda":
        # Makes the device's context this thread's; cuBLAS warns without one. A device that has
        # failed raises its error in the call that this thread is for.
        with contextlib.suppress(RuntimeError):
            torch.cuda.current_stream(device).query()
    with contextlib.suppress(KeyboardInterrupt, SystemExit):  # raised by `interrupt`
        while (work := inbox.get()) is not None:
            work()
            del work  # it refers to a batch and a graph


def start_workers(devices: Sequence[torch.device]) -> list[Worker]:
    """One worker per replica; those on the CPU share the caller's number of torch threads."""
    num_threads, on_cpu = torch.get_num_threads(), sum(d.type == "cpu" for d in devices)
    check_dual_levels(_check_dual_level)
    renew_engine()
    if devices[0].type == "cuda":  # else first calls in several threads fail: pytorch#90613
        one = torch.ones((1, 1), device=devices[0])
        torch.linalg.solve_triangular(one, one, upper=True)
    each = max(1, num_threads // max(1, on_cpu))
    workers = [Worker(k, device, each) for k, device in enumerate(devices)]
    for worker in workers:
        worker.ready.wait()
    torch.set_num_threads(num_threads)  # a worker's number becomes the default of new threads
    return workers


def _check_dual_level() -> None:
    """Refuses forward-mode derivatives in workers: their level is that of the whole process.

    Replicas would end each other's level, and compute wrong derivatives without an error.
    """
    if threading.current_thread().name.startswith(NAME):
        raise RuntimeError(
            "Expected no forward-mode derivative (torch.func.jvp, jacfwd, hessian, "
            "forward_ad.dual_level) where replicas run in threads, got one: torch has one level of "
            'them per process. Use DataParallelStrategy(executor="inorder"), or reverse mode '
            "(torch.func.vjp, jacrev)."
        )


def have_ended(workers: Iterable[Worker], seconds: float) -> bool:
    """Whether all threads but the calling one end within some seconds."""
    deadline = time.monotonic() + seconds
    threads = [w.thread for w in workers if w.thread is not threading.current_thread()]
    for thread in threads:
        while thread.is_alive() and (left := deadline - time.monotonic()) > 0:
            # Half a second at a time: on Windows, Ctrl-C cannot interrupt a longer wait.
            thread.join(min(left, 0.5))
    return not any([thread.is_alive() for thread in threads])


_workers: weakref.WeakSet[Worker] = weakref.WeakSet()


@atexit.register
def _at_exit() -> None:
    """A thread that returned from torch to a Python that has ended would abort the process."""
    workers = list(_workers)
    for worker in workers:
        worker.inbox.put(None)
    if not have_ended(workers, 1.0):
        for worker in workers:
            worker.interrupt(SystemExit)
        have_ended(workers, 1.0)
