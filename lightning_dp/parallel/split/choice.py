"""Choice: with how many devices a kind of work is done soonest, by the times of its pieces.

Rules alone, on ints and floats: who measures tells what was measured. A way is the number of
devices besides the root that may work.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

Way: TypeAlias = int
"""How many devices besides the root may work."""

ROUNDS = 5
"""Measured pieces of each way in a turn; the first piece after a change of ways never counts."""

TURNS = 3
"""Turns of each way at most, as long as two ways are too close to tell."""

CLEAR = 0.1
"""Relative difference of two ways' times from which it takes no more turns."""

FAR = 1.5
"""How many times as long a way takes from which two pieces of it are enough."""

PROBE = 2
"""Measured pieces of another way, to see whether it has become better."""

GAIN = 0.05
"""What another way has to gain to be examined again."""

DRIFT = 0.25
"""Relative change of the best way's times from which the machine counts as changed."""

RATE = 0.01
"""Share of the time that looking again may cost; half of it as long as nothing has changed."""

SAMPLED = 8
"""Of so many pieces one is measured, once the choice is made."""


class Choice:
    """Examines some ways, rests on the best, and looks at the others now and then.

    The first examination costs what it costs. Later ones are paid for by the time spent on the best
    way since: where another way takes many times as long, it is rarely looked at.

    Example:
        >>> choice, seconds = Choice([3, 0]), {3: 0.5, 0: 0.4}
        >>> for _ in range(40):
        ...     way, counts = choice.begin()
        ...     if counts:
        ...         choice.add(way, seconds[way])
        >>> choice.best
        0
    """

    def __init__(self, ways: Sequence[Way]) -> None:
        self.best: Way | None = None  # None while the first examination lasts
        self.sizes: dict[Way, tuple[int, ...]] = {}  # of the latest measured piece
        self._most = max(ways)
        self._times: dict[Way, deque[float]] = {}  # of the latest examination, and since
        self._turns: list[Way] = list(ways)  # those to come; the first one runs
        self._turn: list[float] = []  # the times of the turn that runs
        self._had: dict[Way, int] = {}  # turns since ways were last close
        self._is_probe = False
        self._latest: Way | None = None
        self._rested = 0  # pieces since the choice was made
        self._reference = 0.0
        self._has_drifted = False
        self._budget = 0.0
        self._price = math.inf  # of the next look
        self._next: Way | None = None  # which it is at

    @property
    def is_examining(self) -> bool:
        """Whether ways are being compared now."""
        return bool(self._turns)

    @property
    def seconds(self) -> dict[Way, float]:
        """What a piece takes each way, as far as that is known."""
        return {way: statistics.median(times) for way, times in self._times.items() if times}

    def begin(
        self,
        can: Callable[[Way], bool] = lambda way: True,
        is_settled: Callable[[Way], bool] = lambda way: True,
    ) -> tuple[Way, bool]:
        """The way of the next piece, and whether its time is to be added.

        Args:
            can: whether a way is possible for this piece. What is not possible is not examined.
            is_settled: whether a way is done by now as it will be done later.
        """
        while self._turns and not can(self._turns[0]):
            self._forget(self._turns[0])
        if not self._turns and self._budget >= self._price and self._rested >= 4 * SAMPLED:
            self._look(can)
        if self._turns:
            way = self._turns[0]
            counts = way == self._latest and is_settled(way)
        else:
            way = self._most if self.best is None or not can(self.best) else self.best
            counts = way == self._latest and self._rested % SAMPLED == 0
            self._rested += 1
            self._budget += RATE * self._reference
        self._latest = way
        return way, counts

    def add(self, way: Way, seconds: float) -> None:
        """A piece of work took so long, one that was to be added."""
        if self._turns:
            if way == self._turns[0]:
                self._turn.append(seconds)
                if self._has_enough(way):
                    self._end_turn()
        elif way == self.best:
            # It may have changed while it was not possible: then nothing is known of it.
            self._times.setdefault(way, _few([])).append(seconds)
            self._watch(way)

    def has_changed(self, way: Way) -> None:
        """A way is done differently from now on: with other sizes, say. Its times are void."""
        if self._turns[:1] == [way]:
            self._turn = []
        elif way in self._times and (self._turns or way == self.best):
            self._turns.append(way)
        if not self._is_probe:
            self._times.pop(way, None)

    def consider(self, way: Way) -> None:
        """Examines one more way."""
        if way not in self._times and way not in self._turns:
            self._turns.append(way)

    def state_dict(self) -> dict[str, Any]:
        """What has been learnt, in plain numbers."""
        return {"best": self.best, "seconds": [[w, s] for w, s in self.seconds.items()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where another left off."""
        if state["best"] is None:
            return
        times = {int(way): float(seconds) for way, seconds in state["seconds"]}
        self._times = {way: _few([seconds]) for way, seconds in times.items()}
        self._turns = []
        self._settle(int(state["best"]))

    # Comparing

    def _has_enough(self, way: Way) -> bool:
        count = len(self._turn)
        if self._is_probe:
            return count >= PROBE
        known = [s for other, s in self.seconds.items() if other != way]
        is_far = bool(known) and min(self._turn) > FAR * min(known)
        return count >= ROUNDS or (count >= 2 and is_far)

    def _end_turn(self) -> None:
        way, times, self._turn = self._turns.pop(0), self._turn, []
        if self._is_probe:
            self._end_probe(way, times)
            return
        self._times.setdefault(way, _few([])).extend(times)
        self._had[way] = self._had.get(way, 0) + 1
        if not self._turns:
            self._decide()

    def _decide(self) -> None:
        known = self.seconds
        if not known:
            return
        ranked = sorted(known, key=lambda way: (known[way], way))
        first, *others = ranked
        close = [way for way in others if known[way] <= (1 + CLEAR) * known[first]]
        if close and max(self._had.get(way, 0) for way in (first, close[0])) < TURNS:
            self._turns = [first, close[0]]
        else:
            self._settle(first)

    def _settle(self, best: Way) -> None:
        self.best = best
        self._had = {}
        self._rested = 0
        self._reference = self.seconds[best]
        self._has_drifted = False
        self._budget = 0.0
        self._plan_look()

    def _forget(self, way: Way) -> None:
        """It is not possible: it is as if it had not been thought of."""
        del self._turns[0]
        self._turn, self._is_probe = [], False
        self._times.pop(way, None)
        if not self._turns:
            self._decide()

    # Looking again

    def _watch(self, way: Way) -> None:
        """Notes when the best way has come to take another time."""
        now = self._now(way)
        if abs(now / self._reference - 1) > DRIFT and self._rested >= ROUNDS * SAMPLED:
            self._reference, self._has_drifted = now, True
            self._plan_look()

    def _now(self, way: Way) -> float:
        return statistics.median(list(self._times[way])[-ROUNDS:])

    def _plan_look(self) -> None:
        """Chooses the way that is looked at next, not the same one twice, and what that costs.

        Who has not worked for long has to begin anew.
        """
        known = self.seconds
        prices = {
            way: 2 * known[way] + PROBE * max(0.0, known[way] - self._reference)
            for way in known
            if way != self.best
        }
        order = sorted(prices, key=lambda way: (way == self._next, prices[way]))
        self._next = order[0] if order else None
        half = 1 if self._has_drifted else 2
        self._price = half * prices[order[0]] if order else math.inf

    def _look(self, can: Callable[[Way], bool]) -> None:
        way, self._budget = self._next, 0.0
        if way is not None and can(way):
            self._turns, self._is_probe = [way], True

    def _end_probe(self, way: Way, times: list[float]) -> None:
        self._is_probe, self._has_drifted = False, False
        best = self._most if self.best is None else self.best
        self._times[way] = _few(times)
        if statistics.median(times) < (1 - GAIN) * self._now(best):
            # Both anew, one right after the other: the machine may just have been busy.
            self._times = {w: t for w, t in self._times.items() if w not in (best, way)}
            self._turns = [best, way]
        else:
            self._plan_look()


def _few(times: Sequence[float]) -> deque[float]:
    return deque(times, maxlen=TURNS * ROUNDS)
