"""A worker: a thread with an inbox, in which all calls of one replica run.

Workers are daemon threads. They end when their executor closes or is garbage collected, when the
process ends, and a forked child, which has none of its parent's threads, starts its own.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import os
import sys
import sysconfig
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

import torch
from torch.autograd import forward_ad

from lightning_dp.parallel.apply.rendezvous import PARTICIPANT
from lightning_dp.parallel.torch_private import renew_engine

log = logging.getLogger("lightning_dp")

NAME = "dp-replica-"
PACKAGE = str(Path(__file__).parents[2])
GRACE_SECONDS = 5.0
"""How long replicas may run on after an interrupt, a timeout or `close`."""
AT_EXIT_SECONDS = 2.0


class Worker:
    """Runs what is put into its inbox, until None comes."""

    def __init__(self, replica: int, device: torch.device, num_threads: int) -> None:
        self.inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.ready = threading.Event()
        weakref.finalize(self, self.inbox.put, None)  # so the thread must not refer to the worker
        args = (self.inbox, self.ready, device, num_threads)
        self.thread = threading.Thread(
            target=_live, args=args, name=f"{NAME}{replica}", daemon=True
        )
        self.thread.start()


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
    _refuse_forward_mode()
    renew_engine()
    gpus = [device for device in devices if device.type == "cuda"]
    if len(gpus) > 1:
        # `torch.linalg` loads its library in its first call, and refuses calls of other threads
        # meanwhile (https://github.com/pytorch/pytorch/issues/90613).
        one = torch.ones((1, 1), device=gpus[0])
        torch.linalg.solve_triangular(one, one, upper=True)
    each = max(1, num_threads // max(1, on_cpu))
    workers = [Worker(k, device, each) for k, device in enumerate(devices)]
    for worker in workers:
        worker.ready.wait()
    torch.set_num_threads(num_threads)  # a worker's number becomes the default of new threads
    return workers


_enter_dual_level: Callable[[], Any] = forward_ad.enter_dual_level


def _refuse_forward_mode() -> None:
    """Makes forward-mode derivatives in workers an error.

    Their level is that of the whole process: replicas would end each other's level, and compute
    wrong derivatives without an error.
    """

    def enter_dual_level() -> Any:
        if threading.current_thread().name.startswith(NAME):
            raise RuntimeError(
                "Expected no forward-mode derivative (torch.func.jvp, jacfwd, hessian, "
                "torch.autograd.forward_ad) in replicas that run in threads, got one: torch has "
                'one level of them per process. Use DataParallelStrategy(executor="inorder"), or '
                "reverse mode (torch.func.vjp, jacrev)."
            )
        return _enter_dual_level()

    forward_ad.enter_dual_level = enter_dual_level


# Threads that do not end


def leave_behind(who: str, thread: threading.Thread) -> None:
    """Names a replica whose thread does not end, and interrupts it at its next line of Python."""
    if thread.is_alive():
        log.warning(
            "Expected %s to end within %g seconds, got it still at %s. Its thread is left behind, "
            "and ends when this line does. Give what waits there a timeout.",
            *(who, GRACE_SECONDS, _users_line(thread)),
        )
        interrupt(thread, KeyboardInterrupt)


def _users_line(thread: threading.Thread) -> str:
    """The innermost line of the user's code that a thread runs; else of a library's."""
    frame = sys._current_frames().get(thread.ident or 0)
    stack = traceback.extract_stack(frame) if frame else []
    libraries = (*[sysconfig.get_path(name) for name in ("stdlib", "purelib")], PACKAGE)
    users = [entry for entry in stack if not entry.filename.startswith(libraries)]
    last = [f"{own.filename}:{own.lineno} in {own.name}: {own.line}" for own in users or stack]
    return last[-1] if last else "its end"


def interrupt(thread: threading.Thread, error: type[BaseException]) -> None:
    """Raises an error in a thread as soon as it runs a line of Python."""
    if thread.ident is not None and thread.is_alive():
        ident = ctypes.c_ulong(thread.ident)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(error))


def have_ended(threads: Iterable[threading.Thread], seconds: float) -> bool:
    """Whether all threads end within some seconds."""
    deadline = time.monotonic() + seconds
    for thread in threads:
        while thread.is_alive() and (left := deadline - time.monotonic()) > 0:
            thread.join(min(left, 0.5))  # short, since Ctrl-C ends no `join` on Windows
    return not any([thread.is_alive() for thread in threads])


# The process forks or ends


class HasWorkers(Protocol):
    """An executor."""

    def dismiss(self) -> list[Worker]:
        """Lets its workers go."""


executors: weakref.WeakSet[HasWorkers] = weakref.WeakSet()


def _in_child() -> None:
    for executor in list(executors):
        executor.dismiss()
    PARTICIPANT.set(None)  # a replica that has forked is alone in the child


@atexit.register
def _at_exit() -> None:
    """A thread that returned from torch to a Python that has ended would abort the process."""
    threads = [worker.thread for executor in list(executors) for worker in executor.dismiss()]
    if not have_ended(threads, AT_EXIT_SECONDS / 2):
        for thread in threads:
            interrupt(thread, SystemExit)
        have_ended(threads, AT_EXIT_SECONDS / 2)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
