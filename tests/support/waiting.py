"""Times and ends on a busy machine, which makes work longer and never shorter."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor

TRIES = 20


def quickest(work: Callable[[], float], below: float) -> float:
    """The first of some tries that took less than `below`; else the shortest."""
    times: list[float] = []
    while len(times) < TRIES and min(times, default=below) >= below:
        times.append(work())
    return min(times)


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
