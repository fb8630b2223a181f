"""The schedule of given commands: against one that looks at every nanosecond, in every order."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_devices.schedule import Command, replay

ENGINES = [("compute", 0), ("compute", 1), ("out", 0), ("in", 0), ("in", 1)]
KINDS = [(ENGINES[0],), (ENGINES[1],), (ENGINES[2],), (ENGINES[3],), (ENGINES[2], ENGINES[4])]


@st.composite
def programs(draw: st.DrawFn) -> list[Command]:
    """Some threads' commands, in an order in which they may have been recorded."""
    commands: list[Command] = []
    for i in range(draw(st.integers(1, 14))):
        earlier = st.lists(st.integers(0, i - 1), max_size=2) if i else st.just([])
        thread, needs, after = draw(st.integers(0, 2)), draw(earlier), draw(earlier)
        kind = draw(st.integers(-2, len(KINDS) - 1))
        if kind == -2:
            commands.append(Command(thread, None, needs=tuple(needs), after=tuple(after)))
            continue
        engines = KINDS[kind] if kind >= 0 else ()
        length = draw(st.integers(1, 6)) if engines else 0
        stream = draw(st.integers(0, 3))
        commands.append(
            Command(thread, stream, length, engines, tuple(needs), tuple(after), kind >= 0)
        )
    return commands


def in_another_order(commands: Sequence[Command], seed: int) -> tuple[list[Command], list[int]]:
    """Commands as other thread timing would have recorded them, and their old positions."""
    rng, left = random.Random(seed), list(range(len(commands)))
    new: dict[int, int] = {}
    while left:
        first = {commands[i].thread: i for i in reversed(left)}  # of each thread
        can = [
            i
            for i in first.values()
            if all(other in new for other in (*commands[i].needs, *commands[i].after))
        ]
        chosen = rng.choice(can)
        left.remove(chosen)
        new[chosen] = len(new)
    old = sorted(new, key=new.__getitem__)
    moved = [
        commands[i]._replace(
            needs=tuple(new[j] for j in commands[i].needs),
            after=tuple(new[j] for j in commands[i].after),
        )
        for i in old
    ]
    return moved, old


@dataclass
class TickByTick:
    """The rules of `schedule`, applied nanosecond after nanosecond by looking at everything."""

    commands: Sequence[Command]
    launch: int
    issued: dict[int, int] = field(default_factory=dict)
    ready: dict[int, int] = field(default_factory=dict)
    starts: dict[int, int] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)
    cursors: dict[int, int] = field(default_factory=dict)
    queues: dict[int, list[int]] = field(default_factory=dict)

    def run(self) -> list[tuple[int, int]]:
        now = 0
        while len(self.ends) < len(self.commands):
            while self.one_is_issued(now) or self.one_begins(now):
                pass
            now += 1
            assert now < 1000
        return [(self.starts[i], self.ends[i]) for i in range(len(self.commands))]

    def one_is_issued(self, now: int) -> bool:
        for thread in sorted({command.thread for command in self.commands}):
            own = [i for i, c in enumerate(self.commands) if c.thread == thread]
            i = next((i for i in own if i not in self.issued), None)
            if i is None or self.cursors.get(thread, 0) > now:
                continue
            command = self.commands[i]
            others = (*command.needs, *command.after)
            if any(self.issued.get(other, now + 1) > now for other in others):
                continue
            if command.stream is None:
                if any(self.ends.get(other, now + 1) > now for other in command.needs):
                    continue
                self.starts[i], self.ends[i] = self.cursors.get(thread, 0), now
                self.issued[i] = self.cursors[thread] = now
            else:
                self.issued[i] = self.cursors[thread] = now + self.launch * command.is_launch
                self.queues.setdefault(command.stream, []).append(i)
            return True
        return False

    def one_begins(self, now: int) -> bool:
        turns = sorted(self.turns(now))
        for _, _, _, _, i in turns:
            command = self.commands[i]
            running = [j for j in self.starts if self.ends[j] > now]
            busy = {engine for j in running for engine in self.commands[j].engines}
            if not busy & set(command.engines):
                self.starts[i], self.ends[i] = now, now + command.nanoseconds
                return True
        return False

    def turns(self, now: int) -> Iterator[tuple[int, int, int, int, int]]:
        for queue in self.queues.values():
            i = next((i for i in queue if i not in self.starts), None)
            if i is None:
                continue
            before = queue[: queue.index(i)][-1:]
            command = self.commands[i]
            times = [self.ends.get(other, now + 1) for other in (*command.needs, *before)]
            ready = max((self.issued[i], *times))
            if ready <= now:
                number = [j for j, c in enumerate(self.commands) if c.thread == command.thread]
                yield ready, self.issued[i], command.thread, number.index(i), i


@given(programs(), st.integers(0, 2))
@settings(max_examples=100)
def test_it_is_the_schedule_of_looking_at_every_nanosecond(
    commands: list[Command], launch: int
) -> None:
    schedule = replay(commands, launch)
    found = list(zip(schedule.starts, schedule.ends, strict=True))
    assert found == TickByTick(commands, launch).run()


@given(programs(), st.integers(0, 2), st.integers(0, 10**6))
@settings(max_examples=100)
def test_the_order_in_which_threads_were_recorded_does_not_matter(
    commands: list[Command], launch: int, seed: int
) -> None:
    expected = replay(commands, launch)
    moved, old = in_another_order(commands, seed)
    schedule = replay(moved, launch)
    assert schedule.elapsed == expected.elapsed
    assert schedule.starts == tuple(expected.starts[i] for i in old)
    assert schedule.ends == tuple(expected.ends[i] for i in old)


def test_nothing_takes_no_time() -> None:
    assert replay([]).elapsed == 0


def test_commands_that_wait_for_each_other_are_an_error() -> None:
    with pytest.raises(ValueError, match="wait for each other"):
        replay([Command(0, 0, needs=(1,)), Command(1, 0, needs=(0,))])
