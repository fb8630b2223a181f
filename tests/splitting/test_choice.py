"""With how many devices a kind of work is done: the rules of the choice, on a clock of numbers."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dp.parallel.split.choice import RATE, ROUNDS, TURNS, Choice, Way

ALL, ALONE = 3, 0
COLD = 3.0
"""How many times as long the first piece takes after another way."""


class Machine:
    """Does pieces of work in the ways that a choice asks for, and keeps the time."""

    def __init__(self, choice: Choice, seconds: dict[Way, float], **kwargs: Any) -> None:
        self.choice, self.seconds = choice, seconds
        self.ways: list[Way] = []
        self.spent = self.wasted = 0.0
        self.can: Callable[[Way], bool] = kwargs.get("can", lambda way: True)
        self.noise: Callable[[], float] = kwargs.get("noise", lambda: 1.0)

    def run(self, pieces: int) -> None:
        for _ in range(pieces):
            way, counts = self.choice.begin(self.can)
            assert self.can(way)
            took = self.seconds[way] * self.noise()
            if self.ways[-1:] != [way]:
                took *= COLD
                assert not counts, "the first piece of a way starts caches"
            if counts:
                self.choice.add(way, took)
            best = min(own for other, own in self.seconds.items() if self.can(other))
            self.spent += took
            self.wasted += max(0.0, took - best)
            self.ways.append(way)


@given(st.floats(0.01, 100), st.floats(0.01, 100))
def test_the_faster_way_is_kept(alone: float, everybody: float) -> None:
    machine = Machine(Choice([ALL, ALONE]), {ALL: everybody, ALONE: alone})
    machine.run(40)
    assert machine.choice.best == (ALL if everybody < alone else ALONE) or alone == everybody
    assert machine.seconds[machine.ways[-1]] == min(alone, everybody)


def test_it_begins_with_all_and_a_way_that_is_far_worse_gets_three_pieces() -> None:
    machine = Machine(Choice([ALL, ALONE]), {ALL: 1.0, ALONE: 9.0})
    machine.run(30)
    assert machine.ways == [ALL] * 6 + [ALONE] * 3 + [ALL] * 21


def test_times_before_a_way_is_settled_do_not_count() -> None:
    choice = Choice([ALL, ALONE])
    for piece in range(20):
        way, counts = choice.begin(is_settled=lambda way, piece=piece: way != ALL or piece >= 12)
        assert way == ALL if piece < 12 else True
        assert not counts if piece < 12 else True
        if counts:
            choice.add(way, 1.0)


@pytest.mark.parametrize("alone, turns", [(1.05, TURNS), (1.3, 1)])
@pytest.mark.parametrize("seed", range(10))
def test_two_ways_take_turns_while_they_are_close_and_noise_decides_little(
    alone: float, turns: int, seed: int
) -> None:
    draw = random.Random(seed)
    noise = lambda: 1 + draw.expovariate(40)
    machine = Machine(Choice([ALL, ALONE]), {ALL: 1.0, ALONE: alone}, noise=noise)
    machine.run(60)
    assert [way for way, _ in itertools.groupby(machine.ways)] == [*[ALL, ALONE] * turns, ALL]
    assert machine.choice.best == ALL


@pytest.mark.parametrize("ratio", [1.02, 1.3, 3.0, 20.0])
@pytest.mark.parametrize("best", [ALL, ALONE])
def test_looking_again_costs_less_than_one_percent(best: Way, ratio: float) -> None:
    seconds = {ALL: ratio, ALONE: ratio} | {best: 1.0}
    machine = Machine(Choice([ALL, ALONE]), seconds)
    machine.run(100)
    machine.spent = machine.wasted = 0.0
    machine.run(2000 + round(1000 * ratio))
    assert set(machine.ways[100:]) == {ALL, ALONE}
    assert machine.wasted <= RATE * machine.spent


@pytest.mark.parametrize("before, after", [((1.0, 2.0), (4.0, 2.0)), ((1.0, 2.0), (1.0, 0.2))])
def test_a_machine_that_has_changed_is_examined_again(
    before: tuple[float, float], after: tuple[float, float]
) -> None:
    machine = Machine(Choice([ALL, ALONE]), dict(zip((ALL, ALONE), before, strict=True)))
    machine.run(200)
    assert machine.choice.best == ALL
    machine.seconds = dict(zip((ALL, ALONE), after, strict=True))
    machine.run(4000)
    assert machine.choice.best == ALONE


def test_a_drift_is_followed_sooner_than_the_next_look_would_come() -> None:
    def pieces_until_changed(all_after: float) -> int:
        machine = Machine(Choice([ALL, ALONE]), {ALL: 1.0, ALONE: 1.5})
        machine.run(60)
        machine.seconds = {ALL: all_after, ALONE: 1.2 if all_after > 1 else 0.7}
        for pieces in range(5000):
            if machine.choice.best == ALONE:
                return pieces
            machine.run(1)
        return 5000

    assert pieces_until_changed(2.0) < pieces_until_changed(1.0) < 5000


def test_a_burst_of_the_machine_during_a_look_changes_nothing() -> None:
    machine = Machine(Choice([ALL, ALONE]), {ALL: 1.0, ALONE: 1.2})
    machine.run(60)
    while machine.ways[-1] == ALL:  # until the other way is looked at
        machine.run(1)
    machine.seconds = {ALL: 3.0, ALONE: 3.6}
    machine.run(10)
    machine.seconds = {ALL: 1.0, ALONE: 1.2}
    machine.run(100)
    assert machine.choice.best == ALL


def test_a_burst_of_the_machine_before_a_look_changes_nothing() -> None:
    """The other way seems to gain, as it would have before."""
    machine = Machine(Choice([ALL, ALONE]), {ALL: 1.0, ALONE: 1.2})
    machine.run(60)
    machine.seconds = {ALL: 3.0, ALONE: 3.6}
    while machine.ways[-1] == ALL:
        machine.run(1)
    machine.seconds = {ALL: 1.0, ALONE: 1.2}
    for _ in range(100):
        machine.run(1)
        assert machine.choice.best == ALL
    assert machine.ways[-1] == ALL


def test_a_look_is_compared_with_what_the_best_way_takes_by_now() -> None:
    machine = Machine(Choice([ALL, ALONE]), {ALL: 1.0, ALONE: 1.1})
    machine.run(60)
    machine.seconds[ALL] = 1.2  # too little to be a drift
    machine.run(2000)
    assert machine.choice.best == ALONE


def test_a_gain_that_noise_explains_moves_nothing() -> None:
    machine = Machine(Choice([ALL, ALONE]), {ALL: 1.0, ALONE: 1.5})
    machine.run(60)
    machine.seconds[ALONE] = 0.97
    machine.run(10_000)
    assert machine.choice.best == ALL


def test_what_is_not_possible_is_never_done() -> None:
    machine = Machine(Choice([ALL, ALONE]), {ALL: 5.0, ALONE: 1.0}, can=lambda way: way == ALL)
    machine.run(50)
    assert set(machine.ways) == {ALL} and machine.choice.best == ALL


def test_what_is_no_longer_possible_is_no_longer_done() -> None:
    machine = Machine(Choice([ALL, ALONE]), {ALL: 5.0, ALONE: 1.0})
    machine.run(50)
    assert machine.choice.best == ALONE
    machine.can = lambda way: way == ALL
    machine.run(50)
    assert machine.ways[50:] == [ALL] * 50


def test_a_way_in_between_can_be_considered() -> None:
    machine = Machine(Choice([ALL, ALONE]), {ALL: 3.0, ALONE: 2.0, 1: 1.0})
    machine.run(30)
    machine.choice.consider(1)
    machine.run(30)
    assert machine.choice.best == 1
    machine.choice.consider(1)
    machine.run(1)
    assert not machine.choice.is_examining


def test_times_of_other_sizes_are_void() -> None:
    choice = Choice([ALL, ALONE])
    machine = Machine(choice, {ALL: 9.0, ALONE: 2.0})
    machine.run(4)
    choice.has_changed(ALL)  # the devices' speeds are known by now
    machine.seconds[ALL] = 1.0
    machine.run(30)
    assert choice.best == ALL and choice.seconds[ALL] == 1.0
    machine.seconds[ALL] = 1.5
    choice.has_changed(ALL)
    machine.run(2 * ROUNDS)
    assert choice.best == ALL and choice.seconds[ALL] == 1.5


def test_a_choice_goes_on_where_another_left_off() -> None:
    machine = Machine(Choice([ALL, ALONE]), {ALL: 5.0, ALONE: 1.0})
    machine.run(50)
    other = Choice([ALL, ALONE])
    other.load_state_dict(machine.choice.state_dict())
    again = Machine(other, {ALL: 5.0, ALONE: 1.0})
    again.run(50)
    assert set(again.ways) == {ALONE}
    fresh = Choice([ALL, ALONE])
    fresh.load_state_dict(Choice([ALL, ALONE]).state_dict())
    assert fresh.best is None and fresh.begin()[0] == ALL


def test_the_best_goes_on_after_it_has_changed_while_it_was_not_possible() -> None:
    choice, seconds = Choice([ALL, ALONE]), {ALL: 0.5, ALONE: 0.4}

    def work(pieces: int, *possible: int) -> None:
        for _ in range(pieces):
            way, counts = choice.begin(possible.__contains__)
            if counts:
                choice.add(way, seconds[way])

    work(40, ALL, ALONE)
    assert choice.best == ALONE
    choice.has_changed(ALL)
    choice.has_changed(ALONE)
    work(10, ALL)
    work(20, ALL, ALONE)
    assert choice.best == ALONE and choice.seconds == {ALONE: 0.4}


@given(st.data())
def test_whatever_happens_it_goes_on_with_what_is_possible(data: st.DataObject) -> None:
    choice, possible = Choice([ALL, ALONE]), {ALL}
    for _ in range(data.draw(st.integers(0, 60))):
        event = data.draw(st.sampled_from(["piece", "piece", "piece", "way", "changed", "more"]))
        if event == "way":
            possible ^= {data.draw(st.sampled_from([ALONE, 1]))}
        elif event == "changed":
            choice.has_changed(data.draw(st.sampled_from([ALL, ALONE, 1])))
        elif event == "more":
            choice.consider(1)
        else:
            way, counts = choice.begin(possible.__contains__)
            assert way in possible
            if counts:
                choice.add(way, data.draw(st.floats(0.001, 10)))
