"""Times, ends and what they leave, on a busy machine, which makes work longer, never shorter."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_dp.parallel.apply import current_participant


def soon(condition: Callable[[], bool], seconds: float = 30) -> bool:
    """Whether it is so, or becomes so: a worker lets go of its work a moment after its end."""
    end = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < end:
        time.sleep(0.01)
    return holds


def not_kept(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method, for a hook of a graph: one that reaches what holds it is never freed."""
    known = weakref.WeakMethod(method)
    return lambda *args: known()(*args)


def tensors() -> int:
    """How many there are."""
    gc.collect()
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


class Clock:
    """Virtual time: that of steps as they say it, however busy the machine is."""

    def __init__(self) -> None:
        self._now = 0.0
        self._at_once: Counter[int] = Counter()  # seconds of threads since the time was read
        self._lock = threading.Lock()

    def work(self, seconds: float, alone: bool = False) -> None:
        """This thread works for so long; `alone`, while all others wait."""
        with self._lock:
            self._at_once[0 if alone else threading.get_ident()] += seconds

    def __call__(self) -> float:
        with self._lock:
            waiting = self._at_once.pop(0, 0.0)
            self._now += waiting + max(self._at_once.values(), default=0.0)
            self._at_once.clear()
            return self._now


_named: set[threading.Thread] = set()


def threads_left(seconds: float = 2) -> list[str]:
    """Names of the engine's threads that do not end within a while, each of them once."""
    end = time.monotonic() + seconds
    while True:
        left = [t for t in threading.enumerate() if t.name.startswith("dp-") and t not in _named]
        if not left or time.monotonic() > end:
            _named.update(left)
            return [t.name for t in left]
        gc.collect()
        time.sleep(0.01)


def thread_state(on: str) -> dict[str, Any]:
    """What PyTorch keeps for the calling thread, and for threads to come."""
    state: dict[str, Any] = {
        "gradients": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "default device": torch.get_default_device(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "intra-op threads": torch.get_num_threads(),
        "intra-op threads of new threads": _in_new_thread(torch.get_num_threads),
        "replica": current_participant(),
    }
    if on == "sim":
        accelerator = torch.accelerator
        state["device"] = accelerator.current_device_index()
        state["streams"] = list(map(accelerator.current_stream, range(accelerator.device_count())))
    return state


def _in_new_thread(call: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    thread.join()
    return results[0]
