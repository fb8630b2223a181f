"""What streams, copy engines and host threads were recorded to do, and its schedule."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from sim_devices.schedule import Command, Schedule, replay


class Record(NamedTuple):
    """What the extension has written down of a command."""

    kind: Literal["mark", "op", "copy", "host"]
    thread: int
    stream: int
    name: str
    needs: Sequence[int]
    after: Sequence[int]
    nanoseconds: int
    source: int  # of a copy: a device's index, or -1 for the CPU
    target: int
    bytes: int


@dataclass(frozen=True)
class Timeline:
    """All that was recorded, and when it happens.

    Args:
        first: the number of the first record.
        records: in the order in which they came; of several threads' that is an accident.
        threads: the names of host threads. In the order of these, and not of their numbers, they
            come first where nothing else decides.
        device_of: the device of a stream.
        launch_nanoseconds: what a thread takes to issue an op or a copy.
    """

    first: int
    records: Sequence[Record]
    threads: Sequence[str]
    device_of: Callable[[int], int]
    launch_nanoseconds: int = 0

    @cached_property
    def schedule(self) -> Schedule:
        """When each record's command begins and ends."""
        names = sorted(range(len(self.threads)), key=lambda i: in_order(self.threads[i]))
        ranks = {thread: rank for rank, thread in enumerate(names)}
        return replay([self._command(r, ranks) for r in self.records], self.launch_nanoseconds)

    def _command(self, record: Record, ranks: Mapping[int, int]) -> Command:
        known = [[i - self.first for i in ids if i >= self.first] for ids in (record[4], record[5])]
        return Command(
            thread=ranks[record.thread],
            stream=None if record.kind == "host" else record.stream,
            nanoseconds=record.nanoseconds,
            engines=self._engines(record) if record.nanoseconds else (),
            needs=tuple(known[0]),
            after=tuple(known[1]),
            is_launch=record.kind in ("op", "copy"),
        )

    def _engines(self, record: Record) -> tuple[tuple[str, int], ...]:
        """A kernel has its device to itself, as one has that fills it."""
        if record.kind == "op":
            return (("compute", self.device_of(record.stream)),)
        ways = (("out", record.source), ("in", record.target))
        return tuple((way, device) for way, device in ways if device >= 0)


def in_order(name: str) -> tuple[tuple[bool, int, str], ...]:
    """A key that sorts names with numbers in them as people do.

    Example:
        >>> sorted(["sim:10", "host", "sim:9"], key=in_order)
        ['host', 'sim:9', 'sim:10']
    """
    parts = re.split(r"(\d+)", name)
    return tuple((not p.isdigit(), int(p) if p.isdigit() else 0, p) for p in parts if p)
