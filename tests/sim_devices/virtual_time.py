"""Virtual time: what a program on simulated devices would take, computed and not slept.

What devices and links take is given (`set_speed`, `set_link`), what the program does is recorded by
the extension, and `schedule.replay` computes when each part of it begins and ends.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from itertools import permutations
from typing import Any, Literal, NamedTuple

from sim_devices import extension
from sim_devices.extension import DeviceLike, index_of
from sim_devices.schedule import Command, Schedule, replay

CPU = -1
PRESETS = {"pcie4_peer": {"host": (26e9, 7.5e-6), "peer": (26e9, 2e-6)}}
"""Bytes per second and seconds of links: between each device and the CPU, and between devices.

As measured, some 80 % of what PCI Express 4.0 x16 is made for: GeForce RTX 4090
(github.com/NVIDIA/nvbandwidth/issues/15) and RTX A6000 (nvbandwidth/issues/50).
"""

_latest: tuple[int, int, Schedule] | None = None  # with the recording's version


def set_speed(
    device: DeviceLike,
    *,
    seconds_per_op: float = 0.0,
    seconds_per_element: float = 0.0,
    flops_per_second: float = math.inf,
    bytes_per_second: float = math.inf,
) -> None:
    """Says what ops on ``device`` take: nothing without arguments.

    Each takes ``seconds_per_op + seconds_per_element * (elements of its outputs)``, and the longer
    one of ``flops / flops_per_second`` and ``bytes / bytes_per_second``: of its floating point
    operations (one for each element, but for matrix products and convolutions), and of what it
    reads and writes. Views cost nothing. Nobody waits for it: it is counted (``busy_seconds``), and
    on virtual time it is part of the schedule.
    """
    rates = flops_per_second, bytes_per_second
    extension.loaded.set_speed(index_of(device), seconds_per_op, seconds_per_element, *rates)


def busy_seconds(device: DeviceLike = None) -> float:
    """Returns what the ops of ``device`` have taken so far, by ``set_speed``."""
    return float(extension.loaded.busy_seconds(index_of(device)))


def set_link(
    source: int | str, target: int | str, *, bytes_per_second: float, seconds: float = 0.0
) -> None:
    """Gives copies from one device (or ``"cpu"``) to another a speed; the way back has its own.

    Each takes ``seconds + bytes / bytes_per_second``. Two devices without a link copy through the
    CPU, over the links of both with it: in pieces, so that it takes the time of the slower one, and
    the seconds of both. A link with the CPU that was not set costs nothing. What the copies of
    several devices share, such as a switch or the CPU's memory, is not simulated.
    """
    count = extension.loaded.device_count()
    ends = [_end(source), _end(target)]
    if ends[0] == ends[1] or not all(CPU <= end < count for end in ends):
        raise ValueError(
            f"set_link: expected two of 'cpu' and sim:0 to sim:{count - 1}, "
            f"got {source} and {target}."
        )
    extension.loaded.set_link(*ends, bytes_per_second, seconds)


def _end(device: int | str) -> int:
    if isinstance(device, int):
        return device
    return CPU if device == "cpu" else index_of(device)


def set_links(preset: str | None) -> None:
    """Gives all devices and the CPU the links of a machine of `PRESETS`; None takes all away."""
    if preset is not None and preset not in PRESETS:
        raise ValueError(f"set_links: expected one of {[*PRESETS, None]}, got {preset!r}.")
    extension.loaded.remove_links()
    if preset is not None:
        for pair in permutations(range(CPU, extension.loaded.device_count()), 2):
            link = PRESETS[preset]["host" if CPU in pair else "peer"]
            extension.loaded.set_link(*pair, *link)


def set_clock(clock: Literal["wall", "virtual"]) -> None:
    """Chooses between time as it passes and time that is computed.

    On ``"virtual"`` time, which begins at zero with this call, what the program does is recorded,
    and `elapsed` computes when it would have been through:

    - A stream does its work in order. An op takes what ``set_speed`` says, and has its device to
      itself: ops of two streams of a device run one after another, as kernels do that fill it.
    - A copy takes the time of its link (``set_link``). A device has one engine for copies out and
      one for copies in: copies overlap ops and those of the other direction.
    - What waits for an event, a stream or a device begins when that is through. Events tell the
      time between them on this clock, if both were recorded since this call; else the wall's.
    - The host issues ops and copies in no time, and goes on when what it waits for is through:
      ``synchronize``, ``item``, copies that block. What it computes itself takes no time. ``query``
      hears at once, and always, that it is through.
    - A host thread goes on after another one where it uses memory or an event of that, and where
      one works for the other, in a backward or as a replica (`hand_over`). An order by a lock or a
      queue alone is not seen.

    So the result does not depend on the machine or its load, if the program does not. Where
    gradients of several devices meet in one graph, autograd's threads go by who comes first;
    ``torch.autograd.set_multithreading_enabled(False)`` leaves it one.
    """
    if clock not in ("wall", "virtual"):
        raise ValueError(f"set_clock: expected 'wall' or 'virtual', got {clock!r}.")
    if clock == "wall":
        extension.loaded.stop_recording()
        return
    _follow_workers()
    extension.loaded.start_recording()


def elapsed() -> float:
    """Returns the seconds on virtual time until all work is through, exact to the nanosecond.

    Of what was recorded since ``set_clock("virtual")``, also if the clock is the wall's by now.
    """
    return _schedule()[1].elapsed / 1e9


class Record(NamedTuple):
    """What the extension has written down of a command."""

    kind: Literal["mark", "op", "copy", "host"]
    thread: int
    stream: int
    name: str
    needs: Sequence[int]
    after: Sequence[int]
    nanoseconds: int
    source: int  # of a copy: a device's index, or CPU
    target: int


def _schedule() -> tuple[int, Schedule]:
    """The number of the first record, and when each record's command begins and ends."""
    global _latest
    version = extension.loaded.recording_version()
    if _latest is None or _latest[0] != version:
        first, found, threads = extension.loaded.recorded()
        # In the order of their names, threads come first where nothing else decides: their numbers
        # are an accident.
        names = sorted(range(len(threads)), key=lambda i: _in_order(threads[i]))
        ranks = {thread: rank for rank, thread in enumerate(names)}
        commands = [_command(Record(*record), first, ranks) for record in found]
        _latest = version, first, replay(commands)
    return _latest[1:]


def _command(record: Record, first: int, ranks: Mapping[int, int]) -> Command:
    engines: tuple[tuple[str, int], ...] = ()
    if record.nanoseconds and record.kind == "op":
        engines = (("compute", extension.loaded.device_of_stream(record.stream)),)
    elif record.nanoseconds:
        ways = (("out", record.source), ("in", record.target))
        engines = tuple((way, device) for way, device in ways if device != CPU)
    return Command(
        thread=ranks[record.thread],
        stream=None if record.kind == "host" else record.stream,
        nanoseconds=record.nanoseconds,
        engines=engines,
        needs=tuple(i - first for i in record.needs if i >= first),
        after=tuple(i - first for i in record.after if i >= first),
    )


def _in_order(name: str) -> list[tuple[bool, int, str]]:
    """A key that sorts names with numbers in them as people do: sim:9 before sim:10."""
    parts = re.split(r"(\d+)", name)
    return [(not p.isdigit(), int(p) if p.isdigit() else 0, p) for p in parts if p]


def hand_over() -> Callable[[], AbstractContextManager[None]] | None:
    """Returns what other threads enter that work for this one, which waits for them.

    On virtual time they go on from where this thread is, and it goes on after them. None on the
    wall's, where nobody need know.
    """
    is_recording = extension.loaded.is_recording()
    return partial(_work_for, extension.loaded.own_scope()) if is_recording else None


@contextmanager
def _work_for(scope: Any) -> Iterator[None]:
    before = extension.loaded.exchange_scope(scope)
    try:
        yield
    finally:
        extension.loaded.exchange_scope(before)


@cache
def _follow_workers() -> None:
    """Has the threads of lightning_dp's replicas enter `hand_over`: their caller waits for them."""
    from lightning_dp.parallel.apply.worker import ThreadState

    make, entered = ThreadState.__init__, ThreadState.entered

    def made(self: Any, devices: Any) -> None:
        make(self, devices)
        self.work_for_caller = hand_over() or nullcontext

    @contextmanager
    def entered_for_caller(self: Any, device: Any) -> Iterator[None]:
        with self.work_for_caller(), entered(self, device):
            yield

    cls: Any = ThreadState
    cls.__init__, cls.entered = made, entered_for_caller


# --- called by the extension ---


def thread_name() -> str:
    """The calling thread's name; asked once for each thread."""
    ident = threading.get_ident()
    # Not current_thread(), which would enter a thread that is not Python's among Python's.
    return next((t.name for t in threading.enumerate() if t.ident == ident), "")


def milliseconds_between(start: int, end: int) -> float:
    """The time from one event to another, by the numbers of their records."""
    first, schedule = _schedule()
    return (schedule.ends[end - first] - schedule.ends[start - first]) / 1e6
