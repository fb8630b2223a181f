"""A worker: a daemon thread with an inbox, for the calls that `executor` does not run in order.

It ends when its executor closes or is garbage collected, or when the process ends. What torch keeps
per thread is captured in the caller (`ThreadState`) and entered in the workers.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from lightning_dp.parallel.comm import on_streams, side_streams
from lightning_dp.parallel.devices import current_device
from lightning_dp.parallel.torch_private import (
    default_device,
    saved_tensors_functions,
)

log = logging.getLogger("lightning_dp")

GRACE_SECONDS = 5.0
"""How long replicas may run on after an interrupt, a timeout or `close`."""

_workers: weakref.WeakSet[Worker] = weakref.WeakSet()


class Worker:
    """Runs the calls in its inbox, until None comes."""

    def __init__(self, replica: int, device: torch.device, num_threads: int) -> None:
        self.inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.ready = threading.Event()
        weakref.finalize(self, self.inbox.put, None)  # so the thread must not refer to the worker
        args, name = (self.inbox, self.ready, device, num_threads), f"dp-replica-{replica}"
        self.thread = threading.Thread(target=_live, args=args, name=name, daemon=True)
        self.thread.start()
        _workers.add(self)

    def leave_behind(self, who: str) -> None:
        """Names a replica whose thread does not end; interrupts it at its next line of Python."""
        if self.thread.is_alive():
            frame = sys._current_frames().get(self.thread.ident or 0)
            log.warning(
                "Expected %s to end within %g seconds; its thread is left behind, and ends when "
                "the line ends that it is at. Give what waits there a timeout.\n%s",
                who,
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
    torch.get_num_threads()  # lazy init, which would undo the next line later
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
    if devices[0].type == "cuda":  # else first calls in several threads fail: pytorch#90613
        one = torch.ones((1, 1), device=devices[0])
        torch.linalg.solve_triangular(one, one, upper=True)
    each = max(1, num_threads // max(1, on_cpu))
    workers = [Worker(k, device, each) for k, device in enumerate(devices)]
    for worker in workers:
        worker.ready.wait()
    torch.set_num_threads(num_threads)  # a worker's number becomes the default of new threads
    return workers


def have_ended(workers: Iterable[Worker], seconds: float) -> bool:
    """Whether all threads but the calling one end within some seconds."""
    deadline = time.monotonic() + seconds
    threads = [w.thread for w in workers if w.thread is not threading.current_thread()]
    for thread in threads:
        while thread.is_alive() and (left := deadline - time.monotonic()) > 0:
            # Half a second at a time: on Windows, Ctrl-C cannot interrupt a longer wait.
            thread.join(min(left, 0.5))
    return not any([thread.is_alive() for thread in threads])


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


class ThreadState:
    """The state of the thread that makes it, as far as it concerns work on some devices.

    Grad and inference mode, autocast, the default device, the current device and streams.
    Process-wide state, such as the default dtype, needs nothing; context variables travel with
    `contextvars.copy_context`; under torch function and dispatch modes replicas run in order.

    Args:
        devices: the replicas' devices, the root device first.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._root, self._default = devices[0], default_device()
        kinds = {"cpu", *[device.type for device in devices]}
        self._contexts: list[Callable[[], AbstractContextManager[Any]]] = [
            partial(on_streams, side_streams(devices)),
            partial(torch.inference_mode, torch.is_inference_mode_enabled()),
            partial(torch.set_grad_enabled, torch.is_grad_enabled()),
        ]
        caches = torch.is_autocast_cache_enabled()
        for kind in filter(torch.is_autocast_enabled, kinds):
            dtype = torch.get_autocast_dtype(kind)
            self._contexts.append(partial(torch.autocast, kind, dtype, cache_enabled=caches))

    @contextmanager
    def entered(self, device: torch.device) -> Iterator[None]:
        """Gives the calling thread, a worker, this state, with `device` as the current device."""
        with ExitStack() as stack:
            stack.enter_context(current_device(device))  # before streams of other devices
            for context in self._contexts:
                stack.enter_context(context())
            stack.enter_context(self._default_device_on(device))
            yield

    @contextmanager
    def moved_to(self, device: torch.device) -> Iterator[None]:
        """Gives the thread that made this state another current and default device."""
        default = self._default_device_on(device)
        with current_device(device), default, _one_recomputation_at_a_time():
            yield

    def _default_device_on(self, device: torch.device) -> AbstractContextManager[Any]:
        """A default device that names the root device means "the replica's" in a replica."""
        default = device if self._default == self._root else self._default
        return nullcontext() if default is None else default


def _one_recomputation_at_a_time() -> AbstractContextManager[Any]:
    """In a `torch.utils.checkpoint`: its hooks with a lock, for the devices' autograd threads.

    The first tensor that a backward unpacks recomputes the whole checkpoint; others wait for it.
    """
    functions = saved_tensors_functions()
    if functions is None or functions[0].__module__ != "torch.utils.checkpoint":
        return nullcontext()
    pack, unpack = functions
    lock = vars(unpack).setdefault("lightning_dp_lock", threading.RLock())

    def unpack_locked(packed: Any) -> Any:
        with lock:
            return unpack(packed)

    return saved_tensors_hooks(pack, unpack_locked)
