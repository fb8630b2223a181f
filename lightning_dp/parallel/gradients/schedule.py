"""Schedule: in which order a backward fills the buckets of gradients. Numbers alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

LESSONS = 16
"""So many backwards may show what is not known: some have gradients of a part of the model only."""


class Schedule:
    """Which position of each bucket gets its gradient last, as backwards have shown.

    In `triggers` are those, by bucket. A bucket whose order changes is learnt again. One of which a
    backward fills a position twice is never known: what came first would not be all.
    """

    def __init__(self, buckets: Sequence[Collection[int]]) -> None:
        self._buckets = buckets
        self._left = LESSONS
        self._never: set[int] = set()
        self.triggers: dict[int, int] = {}

    @property
    def unknown(self) -> list[int]:
        """The buckets of which the next backward may show something."""
        known = self._never.union(self.triggers)
        return [j for j in range(len(self._buckets)) if j not in known] if self._left else []

    def learn(self, seen: Mapping[int, Sequence[int]]) -> None:
        """A backward has filled these positions of unknown buckets, in this order.

        Example:
            >>> schedule = Schedule([{0, 1}, {2}])
            >>> schedule.learn({0: [1, 0], 1: []})
            >>> schedule.triggers, schedule.unknown
            ({0: 0}, [1])
        """
        self._left -= bool(seen)
        for j, positions in seen.items():
            if len(set(positions)) < len(positions):
                self._never.add(j)
            elif len(positions) == len(self._buckets[j]):
                self.triggers[j] = positions[-1]

    def forget(self, j: int) -> None:
        """A bucket was not complete when it should have been."""
        self.triggers.pop(j, None)

    def exclude(self, j: int) -> None:
        """A bucket is never known."""
        self.forget(j)
        self._never.add(j)
