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
LIBRARIES = (
    *[sysconfig.get_path(n) for n in ("stdlib", "purelib")],
    str(Path(__file__).parents[2]),
)
GRACE_SECONDS = 5.0
"""How long replicas may run on after an interrupt, a timeout or `close`."""


class Worker:
    """Runs what is put into its inbox, until None comes."""

    def __init__(self, replica: int, device: torch.device, num_threads: int) -> None:
        self.inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.ready = threading.Event()
        weakref.finalize(self, self.inbox.put, None)  # so the thread must not refer to the worker
        args = (self.inbox, self.ready, device, num_threads)
        name = f"{NAME}{replica}"
        self.thread = threading.Thread(target=_live, args=args, name=name, daemon=True)
        self.thread.start()

    def leave_behind(self, who: str = "") -> None:
        """Names a replica whose thread does not end; interrupts it at its next line of Python."""
        if self.thread.is_alive():
            log.warning(
                "Expected %s to end within %g seconds, got it still at %s. Its thread is left "
                "behind, and ends when this line does. Give what waits there a timeout.",
                *(who or self.thread.name, GRACE_SECONDS, self._line()),
            )
            self.interrupt(KeyboardInterrupt)

    def interrupt(self, error: type[BaseException]) -> None:
        """Raises an error in the thread as soon as it runs a line of Python."""
        if self.thread.is_alive():
            ident = ctypes.c_ulong(self.thread.ident or 0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(error))

    def _line(self) -> str:
        """The innermost line of the user's code that the thread runs; else of a library's."""
        frame = sys._current_frames().get(self.thread.ident or 0)
        stack = traceback.extract_stack(frame) if frame else []
        users = [entry for entry in stack if not entry.filename.startswith(LIBRARIES)]
        last = [f"{own.filename}:{own.lineno} in {own.name}: {own.line}" for own in users or stack]
        return last[-1] if last else "its end"


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
    forward_ad.enter_dual_level = _enter_dual_level
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


_torchs_enter_dual_level: Callable[[], Any] = forward_ad.enter_dual_level


def _enter_dual_level() -> Any:
    """Refuses forward-mode derivatives in workers.

    Their level is that of the whole process: replicas would end each other's level, and compute
    wrong derivatives without an error.
    """
    if threading.current_thread().name.startswith(NAME):
        raise RuntimeError(
            "Expected no forward-mode derivative (torch.func.jvp, jacfwd, hessian, "
            "forward_ad.dual_level) where replicas run in threads, got one: torch has one level of "
            'them per process. Use DataParallelStrategy(executor="inorder"), or reverse mode '
            "(torch.func.vjp, jacrev)."
        )
    return _torchs_enter_dual_level()


def have_ended(workers: Iterable[Worker], seconds: float) -> bool:
    """Whether all threads but the calling one end within some seconds."""
    deadline = time.monotonic() + seconds
    threads = [w.thread for w in workers if w.thread is not threading.current_thread()]
    for thread in threads:
        while thread.is_alive() and (left := deadline - time.monotonic()) > 0:
            thread.join(min(left, 0.5))  # short, since Ctrl-C ends no `join` on Windows
    return not any([thread.is_alive() for thread in threads])


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
    workers = [worker for executor in list(executors) for worker in executor.dismiss()]
    if not have_ended(workers, 1.0):
        for worker in workers:
            worker.interrupt(SystemExit)
        have_ended(workers, 1.0)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
