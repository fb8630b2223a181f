"""The timeline: what streams, copy engines and host threads do on virtual time, row by row."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeAlias

from sim_devices.schedule import Command, Schedule, replay

Kind: TypeAlias = Literal["compute", "copy", "wait"]

HOST = "host"


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


class Row(NamedTuple):
    """A line of the timeline: a stream, copies out of or into a device, or a host thread."""

    place: str
    name: str


class Span(NamedTuple):
    """What goes on in a row from one nanosecond to another."""

    row: Row
    name: str
    kind: Kind
    start: int
    end: int
    details: Mapping[str, Any]


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

    @cached_property
    def spans(self) -> list[Span]:
        """What takes time, row by row and in the order of time."""
        times = zip(self.records, self.schedule.starts, self.schedule.ends, strict=True)
        spans = [
            Span(row, name, kind, start, end, details)
            for record, start, end in times
            if end > start
            for row, name, kind, details in self._places(record)
        ]
        return sorted(spans, key=lambda span: (_row_order(span.row), span.start))

    @property
    def rows(self) -> list[Row]:
        """The rows with something in them: the host's threads, then device after device."""
        return list(dict.fromkeys(span.row for span in self.spans))

    def chrome_trace(self) -> dict[str, Any]:
        """The timeline in the format of chrome://tracing and https://ui.perfetto.dev."""
        places = list(dict.fromkeys(row.place for row in self.rows))
        numbers = {row: i for i, row in enumerate(self.rows)}
        events: list[dict[str, Any]] = []
        for i, place in enumerate(places):
            events.append(_named("process_name", place, i, 0))
            events.append(
                {"ph": "M", "name": "process_sort_index", "pid": i, "args": {"sort_index": i}}
            )
        for row, i in numbers.items():
            events.append(_named("thread_name", row.name, places.index(row.place), i))
        for span in self.spans:
            events.append(
                {
                    "ph": "X",
                    "name": span.name,
                    "cat": span.kind,
                    "pid": places.index(span.row.place),
                    "tid": numbers[span.row],
                    "ts": span.start / 1e3,  # microseconds
                    "dur": (span.end - span.start) / 1e3,
                    "args": dict(span.details),
                }
            )
        return {"traceEvents": events, "displayTimeUnit": "ns"}

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

    def _places(self, record: Record) -> Iterator[tuple[Row, str, Kind, Mapping[str, Any]]]:
        """The rows where a record is seen: a copy between two devices in one of each."""
        if record.kind == "host":
            yield Row(HOST, self.threads[record.thread]), "waits", "wait", {}
        elif record.kind == "op":
            device, issued_by = self.device_of(record.stream), self.threads[record.thread]
            row = Row(f"sim:{device}", stream_name(record.stream))
            yield row, record.name, "compute", {"issued by": issued_by}
        else:
            source, target = map(end_name, (record.source, record.target))
            details = {"bytes": record.bytes, "stream": stream_name(record.stream)}
            if record.source >= 0:
                yield Row(source, "copies out"), f"to {target}", "copy", details
            if record.target >= 0:
                yield Row(target, "copies in"), f"from {source}", "copy", details


def end_name(index: int) -> str:
    """The name of a link's end: of a device, or the CPU."""
    return f"sim:{index}" if index >= 0 else "cpu"


def stream_name(number: int) -> str:
    """The name of a stream among its device's: the default ones have their devices' numbers."""
    return f"stream {number}" if number >= 128 else "default stream"


def in_order(name: str) -> tuple[tuple[bool, int, str], ...]:
    """A key that sorts names with numbers in them as people do.

    Example:
        >>> sorted(["sim:10", "host", "sim:9"], key=in_order)
        ['host', 'sim:9', 'sim:10']
    """
    parts = re.split(r"(\d+)", name)
    return tuple((not p.isdigit(), int(p) if p.isdigit() else 0, p) for p in parts if p)


def _row_order(row: Row) -> tuple[Any, ...]:
    is_copy = row.name.startswith("copies")
    return row.place != HOST, in_order(row.place), is_copy, in_order(row.name)


def _named(kind: str, name: str, process: int, row: int) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": row, "args": {"name": name}}
