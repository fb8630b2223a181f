"""When each command begins and ends on virtual time: numbers alone, nothing runs here.

Host threads issue commands to streams. A command begins when its stream is through with the one
before, when all that it needs has ended, and when its engines are free: a device's one for
computing, or those for copies out of one device and into another. Of those that wait for an engine,
the one that has been ready for longest comes first; of these the one that was issued first, of
these the one of the first thread, and of these the first one there.

So the result follows from each thread's own order and from what needs what, and not from the order
in which commands of several threads are given. Times are whole nanoseconds: sums are exact.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Command(NamedTuple):
    """What a host thread issues to a stream, or a wait of the thread itself.

    Args:
        thread: who issues it; its rank decides where nothing else does.
        stream: where it runs, after what was issued there before; None: the thread waits until all
            that it needs has ended.
        nanoseconds: how long it runs.
        engines: what it occupies meanwhile. None are needed for what takes no time.
        needs: commands that have to end before it begins, and have to be issued before it is.
        after: commands that have to be issued before it is.
    """

    thread: int
    stream: int | None
    nanoseconds: int = 0
    engines: tuple[Hashable, ...] = ()
    needs: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


@dataclass(frozen=True)
class Schedule:
    """When commands end, by their positions."""

    ends: tuple[int, ...]
    elapsed: int  # until all streams and threads are through


def replay(commands: Sequence[Command]) -> Schedule:
    """Computes the schedule of commands, each thread's in its order.

    Commands name each other by their positions.

    Example:
        >>> copy = Command(thread=0, stream=1, nanoseconds=5, engines=("in",))
        >>> op = Command(thread=0, stream=0, nanoseconds=7, engines=("compute",), needs=(0,))
        >>> replay([copy, op]).ends
        (5, 12)
    """
    return _Replay(commands).run()


class _Replay:
    """Host threads and engines, by a clock that never goes back.

    Whatever happens next is the earliest thing that can: a thread issues a command, or a command
    begins. How long it runs is known then, so that all it lets go on can be planned at once.
    """

    def __init__(self, commands: Sequence[Command]) -> None:
        count = len(commands)
        self._commands = commands
        self._programs: dict[int, deque[int]] = defaultdict(deque)
        self._numbers = [0] * count  # of each command in its thread
        for i, command in enumerate(commands):
            program = self._programs[command.thread]
            self._numbers[i] = len(program)
            program.append(i)
        self._cursors = dict.fromkeys(self._programs, 0)
        self._issued: list[int | None] = [None] * count
        self._ends: list[int | None] = [None] * count
        self._queues: dict[int, deque[int]] = defaultdict(deque)
        self._through: dict[int, int] = defaultdict(int)  # when a stream is through with the last
        self._free: dict[Hashable, int] = defaultdict(int)
        self._threads: list[tuple[int, int]] = []  # a heap: when a thread goes on
        self._ready: list[tuple[int, int, int, int, int, int]] = []  # a heap: what can begin
        self._for_issue: dict[int, list[int]] = defaultdict(list)  # threads that wait for one
        self._for_end: dict[int, list[int]] = defaultdict(list)  # commands at the head that do

    def run(self) -> Schedule:
        for thread in self._programs:
            self._look_ahead(thread)
        while self._threads or self._ready:
            if self._threads and (not self._ready or self._threads[0][0] <= self._ready[0][0]):
                self._issue(*heapq.heappop(self._threads))
            else:
                self._begin(*heapq.heappop(self._ready))
        ends = tuple(end for end in self._ends if end is not None)
        assert len(ends) == len(self._commands), "some commands wait for each other"
        return Schedule(ends, max((*ends, *self._cursors.values()), default=0))

    def _look_ahead(self, thread: int) -> None:
        """Plans when a thread issues its next command, unless it has to wait for another thread."""
        if not self._programs[thread]:
            return
        i = self._programs[thread][0]
        command, time = self._commands[i], self._cursors[thread]
        for other in (*command.needs, *command.after):
            issued = self._issued[other]
            if issued is None:
                self._for_issue[other].append(thread)
                return
            time = max(time, issued)
        if command.stream is None:
            met = self._when_needs_end(i)
            if met is None:
                return
            time = max(time, met)
        heapq.heappush(self._threads, (time, thread))

    def _issue(self, time: int, thread: int) -> None:
        i = self._programs[thread].popleft()
        command = self._commands[i]
        if command.stream is None:
            self._issued[i] = self._cursors[thread] = time
            self._end(i, time)
        else:
            self._issued[i] = self._cursors[thread] = time
            self._queues[command.stream].append(i)
            if self._queues[command.stream][0] == i:
                self._plan(i)
        for waiting in self._for_issue.pop(i, ()):
            self._look_ahead(waiting)
        self._look_ahead(thread)

    def _plan(self, i: int) -> None:
        """Plans when the first command of a stream begins, if it is known when its needs end."""
        command, ready = self._commands[i], self._issued[i]
        assert command.stream is not None and ready is not None
        met = self._when_needs_end(i)
        if met is not None:
            self._offer(i, max(ready, self._through[command.stream], met))

    def _when_needs_end(self, i: int) -> int | None:
        """The time; None if that is open: then the command is planned again once it is known."""
        latest = 0
        for other in self._commands[i].needs:
            end = self._ends[other]
            if end is None:
                self._for_end[other].append(i)
                return None
            latest = max(latest, end)
        return latest

    def _offer(self, i: int, ready: int) -> None:
        command, issued = self._commands[i], self._issued[i]
        assert issued is not None
        start = max((ready, *(self._free[engine] for engine in command.engines)))
        turn = (start, ready, issued, command.thread, self._numbers[i], i)
        heapq.heappush(self._ready, turn)

    def _begin(self, start: int, ready: int, issued: int, thread: int, number: int, i: int) -> None:
        command = self._commands[i]
        if any(self._free[engine] > start for engine in command.engines):
            self._offer(i, ready)  # another one was first
            return
        end = start + command.nanoseconds
        assert command.stream is not None
        self._free.update(dict.fromkeys(command.engines, end))
        self._through[command.stream] = end
        queue = self._queues[command.stream]
        queue.popleft()
        self._end(i, end)
        if queue:
            self._plan(queue[0])

    def _end(self, i: int, end: int) -> None:
        """It is known when a command ends: plans what has waited for that."""
        self._ends[i] = end
        for waiting in self._for_end.pop(i, ()):
            if self._commands[waiting].stream is None:
                self._look_ahead(self._commands[waiting].thread)
            else:
                self._plan(waiting)
