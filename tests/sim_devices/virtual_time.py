"""Virtual time: what a program on simulated devices would take, computed and not slept.

`set_clock` says what counts, and `schedule` computes it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Literal, TypeAlias, get_args

from sim_devices import attached
from sim_devices.links import check_seconds
from sim_devices.timeline import Record, Timeline

Clock: TypeAlias = Literal["wall", "virtual"]

_launch_nanoseconds = 0
_has_recorded = False
_latest: tuple[int, Timeline] | None = None  # with the recording's version


def set_clock(clock: Clock, *, seconds_per_launch: float = 0.0) -> None:
    """Choose between time as it passes and time that is computed.

    On ``"virtual"`` time, which begins at zero with this call, nothing waits. What the program does
    is recorded, and `elapsed` computes when it would have been through:

    - The work of a stream is done in order. An op takes what ``set_speed`` says, and has its device
      to itself: ops of two streams of a device run one after another, as kernels do that fill it.
    - A copy between devices, or a device and the CPU, takes the time of its link (``set_link``),
      and no op's. A device has one engine for copies out and one for copies in: copies overlap ops
      and those of the other direction. One between two devices needs an engine of both.
    - What waits for an event, a stream or a device, begins when that is through. So does what uses
      memory that others still write, where races are let pass (``set_strict``).
    - Events tell the time between them on this clock, if both were recorded since this call; else
      the wall's, which is the one that both have.
    - The host issues ops and copies in no time, or in ``seconds_per_launch`` each. It goes on when
      what it waits for is through: ``synchronize``, ``item``, copies that block. What it computes
      itself, Python included, takes no time. Whether something is through (``query``) it hears at
      once, and always that it is: who means to wait should not ask in a loop.
    - Every host thread has its own order. It goes on after another one where it uses memory or an
      event of that, and where one works for the other, in a backward or as a replica of
      ``dp_custom``. An order by a lock or a queue alone is not seen. Threads do not hinder each
      other.

    So the result does not depend on the machine or its load, if the program does not. With
    ``dp_custom``, ``executor="auto"`` goes by this time, but for what it has measured by the wall's
    before: call this before the fit, or take ``"threads"`` or ``"inorder"``. Where gradients of
    several devices meet in one graph, as with ``mode="forward"``, autograd's threads go by who
    comes first; ``torch.autograd.set_multithreading_enabled(False)`` leaves it one. Recording takes
    memory, some hundred bytes for each op, until the next call of this.

    Args:
        clock: ``"wall"`` or ``"virtual"``.
        seconds_per_launch: on virtual time, what the host takes to issue an op or a copy.
    """
    global _launch_nanoseconds, _has_recorded
    if clock not in get_args(Clock):
        raise ValueError(f"set_clock: expected 'wall' or 'virtual', got {clock!r}.")
    check_seconds("set_clock", seconds_per_launch=seconds_per_launch)
    if clock == "wall":
        attached.extension.stop_recording()
        return
    _launch_nanoseconds = round(seconds_per_launch * 1e9)
    _has_recorded = True
    attached.extension.start_recording()


def elapsed() -> float:
    """Return the seconds on virtual time until all work is through, exact to the nanosecond.

    Of what was recorded since ``set_clock("virtual")``, also if the clock is the wall's by now. To
    ask changes nothing.
    """
    return timeline().schedule.elapsed / 1e9


def timeline() -> Timeline:
    """Return what streams, copies and host threads do on virtual time."""
    global _latest
    if not _has_recorded:
        raise RuntimeError(
            "Expected a program on virtual time, got none. Call torch.sim.set_clock('virtual') "
            "before it."
        )
    version = attached.extension.recording_version()
    if _latest is None or _latest[0] != version:
        first, records, threads = attached.extension.recorded()
        device_of = attached.extension.device_of_stream
        records = [Record(*record) for record in records]
        _latest = version, Timeline(first, records, threads, device_of, _launch_nanoseconds)
    return _latest[1]


def hand_over() -> Callable[[], AbstractContextManager[None]] | None:
    """Return what other threads enter that work for this one, which waits for them.

    On virtual time they go on from where this thread is, and it goes on after them. None on the
    wall's, where nobody need know.
    """
    extension = attached.extension
    return partial(_work_for, extension.own_scope()) if extension.is_recording() else None


@contextmanager
def _work_for(scope: Any) -> Iterator[None]:
    before = attached.extension.exchange_scope(scope)
    try:
        yield
    finally:
        attached.extension.exchange_scope(before)


def thread_name() -> str:
    """The calling thread's name; asked once for each thread, by the extension."""
    ident = threading.get_ident()
    # Not current_thread(), which would enter a thread that is not Python's among Python's.
    return next((t.name for t in threading.enumerate() if t.ident == ident), "")


def milliseconds_between(start: int, end: int) -> float:
    """The time from one event to another, by the numbers of their records."""
    found = timeline()
    ends = found.schedule.ends
    return (ends[end - found.first] - ends[start - found.first]) / 1e6
