"""Which of a test's combinations of parameters are enough for every two values to meet.

A mistake that takes three values at once to show is rare; the whole product of four parameters
takes hours. This is known as pairwise testing.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import combinations
from typing import TypeAlias

Row: TypeAlias = Sequence[Hashable]


def covering(rows: Sequence[Row], first: Sequence[bool]) -> list[int]:
    """The indices of rows in which every two values meet that meet in any of them.

    Not the fewest, but few: each time that row is taken which has most pairs that are new.

    Args:
        rows: for each combination a value of each parameter.
        first: for each, whether it is taken before those that are not, wherever it has a new pair.

    Example:
        >>> rows = [(a, b, c) for a in "xy" for b in "xy" for c in "xy"]
        >>> [rows[i] for i in covering(rows, [True] * 8)]
        [('x', 'x', 'x'), ('x', 'y', 'y'), ('y', 'x', 'y'), ('y', 'y', 'x')]
    """
    meeting = [_pairs(row) for row in rows]
    new, taken = set().union(*meeting), []
    for is_turn in (True, False):
        own = [i for i, is_first in enumerate(first) if is_first is is_turn]
        while own := [i for i in own if new & meeting[i]]:
            taken.append(best := max(own, key=lambda i: len(new & meeting[i])))
            new -= meeting[best]
    return sorted(taken)


def _pairs(row: Row) -> set[Hashable]:
    """Of values and their places; of one value alone, it."""
    values = list(enumerate(row))
    return set(combinations(values, 2)) or set(values)
