"""Combinations in which every two values meet."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.pairwise import covering

Row = tuple[int, ...]


def pairs(rows: Sequence[Row]) -> set[tuple[tuple[int, int], ...]]:
    """Of all values, with the columns that they are in."""
    return {pair for row in rows for pair in combinations(enumerate(row), 2)}


def picked(rows: Sequence[Row], first: Sequence[bool] | None = None) -> list[Row]:
    return [rows[i] for i in covering(rows, first or [True] * len(rows))]


@given(st.sets(st.tuples(*[st.integers(0, 3)] * 4)))
def test_every_two_values_that_meet_anywhere_meet(found: set[Row]) -> None:
    rows = sorted(found)
    assert pairs(picked(rows)) == pairs(rows)


@given(st.lists(st.integers(1, 4), min_size=3, max_size=4))
def test_of_a_whole_product_few_are_left(lengths: list[int]) -> None:
    rows = list(product(*map(range, lengths)))
    longest, second, *_ = sorted(lengths, reverse=True)
    assert longest * second <= len(picked(rows)) <= 2 * longest * second


@given(st.sets(st.tuples(*[st.integers(0, 2)] * 3), min_size=1))
def test_the_first_ones_need_none_of_the_others(found: set[Row]) -> None:
    rows = sorted(found)
    first = [i % 2 == 0 for i in range(len(rows))]
    own = [row for row, is_first in zip(rows, first, strict=True) if is_first]
    assert pairs([row for row in picked(rows, first) if row in own]) == pairs(own)


@pytest.mark.parametrize("rows", [[], [()], [(1,), (2,)], [(1, 1), (1, 2)]])
def test_one_or_two_columns_are_whole(rows: list[Row]) -> None:
    assert picked(rows) == [row for row in rows if row]
