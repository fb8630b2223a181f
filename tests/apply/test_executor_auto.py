"""`executor="auto"` costs little more than the better of its two ways, by a clock of the test."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_dp.parallel.apply.executor import Trial

MEASURED = Trial.ROW * Trial.ROWS


def times(trial: Trial, calls: int, seconds: dict[bool, float], change: Any = None) -> list[float]:
    """The times of calls; `change` has those of the first call of a way after the other one."""
    first, taken, before = change or seconds, [], None
    for _ in range(calls):
        way = trial.begin()
        taken.append((seconds if way is before else first)[way])
        before = way
        if trial.is_measured:
            for part in (0.4, 0.6):  # a forward and a backward
                stretch: Any = SimpleNamespace(seconds=part * taken[-1], is_over=lambda: True)
                trial.add(stretch)
    return taken


@pytest.mark.parametrize("is_threads", [True, False])
@pytest.mark.parametrize("slower", [1.05, 1.3, 3.0])
@pytest.mark.parametrize("change", [1.0, 4.0])
def test_after_the_first_calls_it_costs_less_than_three_percent(
    is_threads: bool, slower: float, change: float
) -> None:
    """Though the first call after a change of ways takes longer, as it starts teams of threads."""
    seconds = {is_threads: 1.0, not is_threads: slower}
    first = {way: change * value for way, value in seconds.items()}
    trial = Trial()
    times(trial, MEASURED, seconds, first)
    taken = times(trial, 4000, seconds, first)
    assert sum(taken) / len(taken) < 1.03


@pytest.mark.parametrize("is_threads", [True, False])
def test_a_way_that_becomes_faster_is_taken(is_threads: bool) -> None:
    trial = Trial()
    times(trial, 100, {is_threads: 1.0, not is_threads: 10.0})
    seconds = {is_threads: 1.0, not is_threads: 0.5}
    times(trial, 3000, seconds)
    assert times(trial, 300, seconds).count(0.5) > 0.9 * 300


def test_a_busy_moment_changes_nothing() -> None:
    trial = Trial()
    times(trial, MEASURED, {True: 1.0, False: 2.0})
    for _ in range(5):
        times(trial, 2, {True: 100.0, False: 100.0})
        times(trial, 30, {True: 1.0, False: 2.0})
    assert times(trial, 1000, {True: 1.0, False: 2.0}).count(1.0) > 980


def test_times_of_devices_that_are_behind_are_read_later() -> None:
    trial, late, is_over = Trial(), [], [False]
    for _ in range(40):
        threads = trial.begin()
        if trial.is_measured:
            seconds = 2.0 if threads else 1.0
            stretch: Any = SimpleNamespace(seconds=seconds, is_over=lambda: is_over[0])
            late.append(seconds)
            trial.add(stretch)
    assert set(late) == {1.0, 2.0} and not trial.has_ended
    is_over[0] = True
    times(trial, Trial.ROW, {True: 2.0, False: 1.0})
    assert set(times(trial, 20, {True: 2.0, False: 1.0})) == {1.0}
