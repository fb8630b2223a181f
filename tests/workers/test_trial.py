"""Trials: `executor="auto"` costs no more than the better of its two ways, by a clock of ours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from lightning_dp.parallel.workers.trial import Trial

TRIED = 20  # pieces of work, of which a trial needs fewer


class Piece:
    """What a trial asks of a stretch of work, once it is over."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def is_over(self) -> bool:
        return True


def times(trial: Trial, pieces: int, seconds: dict[bool, float], change: Any = None) -> list[float]:
    """Those of so many pieces of work; `change` are the times of the first one of a way."""
    first, taken, before = change or seconds, [], None
    for _ in range(pieces):
        trial.begin()
        way = trial.threads
        taken.append((seconds if way is before else first)[way])
        before = way
        if trial.is_measured:
            for part in (0.4, 0.6):  # a forward and a backward
                trial.add(Piece(part * taken[-1]))
    return taken


@pytest.mark.parametrize("is_threads", [True, False])
@pytest.mark.parametrize("slower", [1.05, 1.3, 3.0])
@pytest.mark.parametrize("change", [1.0, 1.2, 4.0])
def test_after_the_trial_it_costs_less_than_two_percent(
    is_threads: bool, slower: float, change: float
) -> None:
    """Where the other way is slower, and the first piece of work after a change still more."""
    seconds = {is_threads: 1.0, not is_threads: slower}
    first = {way: change * value for way, value in seconds.items()}
    trial = Trial()
    times(trial, TRIED, seconds, first)
    taken = times(trial, 4000, seconds, first)
    assert sum(taken) / len(taken) < 1.02


def test_who_is_slower_only_just_after_a_change_is_taken() -> None:
    """As in order is, while the teams of OpenMP start: 47 ms for once, and then 13."""
    trial = Trial()
    taken = times(trial, 200, {True: 15.0, False: 13.0}, {True: 15.0, False: 47.0})
    assert taken[TRIED:].count(13.0) > 0.9 * len(taken[TRIED:])


def test_the_first_pieces_of_all_do_not_count() -> None:
    trial = Trial()
    times(trial, 1, {True: 1000.0, False: 1000.0})
    assert times(trial, 63, {True: 1.0, False: 2.0})[TRIED:] == [1.0] * (63 - TRIED)


@pytest.mark.parametrize("is_threads", [True, False])
@pytest.mark.parametrize("change", [1.0, 5.0])
def test_who_becomes_faster_is_found_out(is_threads: bool, change: float) -> None:
    """Though it was ten times slower, and is asked seldom for that. First pieces do not count."""
    trial = Trial()
    times(trial, 100, {is_threads: 1.0, not is_threads: 10.0})
    seconds = {is_threads: 1.0, not is_threads: 0.5}
    first = {way: change * value for way, value in seconds.items()}
    times(trial, 3000, seconds, first)
    taken = times(trial, 300, seconds, first)
    assert taken.count(0.5) > 0.9 * len(taken)


def test_a_busy_moment_changes_nothing() -> None:
    trial = Trial()
    times(trial, TRIED, {True: 1.0, False: 2.0})
    for _ in range(5):
        times(trial, 2, {True: 100.0, False: 100.0})
        assert set(times(trial, 30, {True: 1.0, False: 2.0})) <= {1.0, 2.0}
    assert times(trial, 1000, {True: 1.0, False: 2.0}).count(1.0) > 980


def test_times_that_arrive_late_are_waited_for_and_nobody_stops() -> None:
    """Devices may be many pieces of work behind."""

    class Late(Piece):
        over = False

        def __init__(self, takes: float) -> None:
            self.takes = takes

        def is_over(self) -> bool:
            return self.over

        @property
        def seconds(self) -> float:
            assert self.over
            return self.takes

    def pieces() -> Iterator[Late]:
        for _ in range(40):
            trial.begin()
            if trial.is_measured:
                piece = Late(2.0 if trial.threads else 1.0)
                trial.add(piece)
                yield piece

    trial = Trial()
    late = list(pieces())
    assert {piece.takes for piece in late} == {1.0, 2.0}
    for piece in late:
        piece.over = True
    assert set(times(trial, 20, {True: 2.0, False: 1.0})) == {1.0}
