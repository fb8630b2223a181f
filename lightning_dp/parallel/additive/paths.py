"""Paths: the calls in a trace that a result came of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import starmap

from lightning_dp.parallel.additive.traces import NO_NUMBER, Call, Trace


def side_by_side(
    traces: Sequence[Trace], results: Sequence[Sequence[int]]
) -> Iterator[tuple[Call, ...]]:
    """Each call that all replicas' results came of; none if they did not call the same functions.

    Results are given by their numbers. Those of what is yielded are in the order in which tensors
    take part, so the same on all replicas.
    """
    paths = [*starmap(_path, zip(traces, results, strict=True))]
    if all([_outline(path) == _outline(paths[0]) for path in paths]):
        yield from zip(*paths, strict=True)


def _path(trace: Trace, results: Sequence[int]) -> list[Call]:
    needed, path = {*results}, list[Call]()
    for call in reversed(trace.calls):
        if not needed.isdisjoint([given.number for given in call.gives]):
            needed.update(call.takes)
            path.append(call)
    numbers = {given.number: given.number for given in trace.shard} | {NO_NUMBER: NO_NUMBER}
    return [_renumbered(call, numbers) for call in reversed(path)]


def _renumbered(call: Call, numbers: dict[int, int]) -> Call:
    takes = [numbers.setdefault(number, len(numbers)) for number in call.takes]
    gives = [
        given._replace(number=numbers.setdefault(given.number, len(numbers)))
        for given in call.gives
    ]
    return call._replace(takes=tuple(takes), gives=tuple(gives))


def _outline(path: Sequence[Call]) -> list[tuple[str, tuple[int, ...], list[int]]]:
    return [(own.name, own.takes, [given.number for given in own.gives]) for own in path]
