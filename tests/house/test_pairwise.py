"""Combinations in which every two values meet."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st
from support.pairwise import covering

Row = tuple[int, ...]


def pairs(rows: Sequence[Row]) -> set[tuple[tuple[int, int], ...]]:
    """Of all values, with the columns that they are in."""
    return {pair for row in rows for pair in combinations(enumerate(row), 2)}


@given(st.sets(st.tuples(*[st.integers(0, 2)] * 4)), st.data())
def test_every_two_values_meet_and_the_first_ones_need_no_others(
    found: set[Row], data: st.DataObject
) -> None:
    rows = sorted(found)
    first = [data.draw(st.booleans()) for _ in rows]
    picked = [rows[i] for i in covering(rows, first)]
    own = [row for row, is_first in zip(rows, first, strict=True) if is_first]
    assert pairs(picked) == pairs(rows)
    assert pairs([row for row in picked if row in own]) == pairs(own)
