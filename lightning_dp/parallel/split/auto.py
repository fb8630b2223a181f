"""Auto: as many devices work as make a step shortest, and each gets what its speed asks for.

No tensor and no device in here: sizes and seconds in, sizes out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from lightning_dp.parallel.split.active import best_active, best_with, between, step_seconds
from lightning_dp.parallel.split.adaptive import Adaptive
from lightning_dp.parallel.split.arithmetic import Sizes, minimax
from lightning_dp.parallel.split.choice import Choice, Way
from lightning_dp.parallel.split.usage import Caps, StepUsage

NEAR = 1.25
"""Batches whose sizes differ by less are one kind of work."""

OTHER = 32
"""A way is another one if more than one in so many samples have moved."""

WORTH = 0.9
"""Share of the best measured time below which a way that the model proposes is tried."""

_best_with = lru_cache(maxsize=64)(best_with)  # most steps pose the same problem


@dataclass
class Piece:
    """One piece of work: which way it is done, and whether its time is to be told."""

    way: Way
    n: int
    counts: bool = False
    choice: Choice | None = None
    may_propose: bool = False


class Auto:
    """A split that lets as many devices work as make a step shortest, the root alone maybe.

    All of them share the samples as `Adaptive` learns it from their times. Each kind of step, and
    each size of batches, is done by all devices at first, then by the root alone, and a `Choice`
    keeps the faster way. From both times and the devices' speeds follows what is serial in a step;
    where some of the devices should be faster by that, they are tried as well.

    Who runs the steps asks `begin` which way, and tells `end` how long it took. Without that all
    devices work.

    Example:
        >>> split = Auto(2)
        >>> for _ in range(30):
        ...     piece = split.begin("training_step", 8)
        ...     sizes = split(8)
        ...     split.end(piece, 1.0 if sizes == (8, 0) else 3.0, sizes)
        >>> split(8)
        (8, 0)
    """

    def __init__(self, k: int) -> None:
        self._k = k
        self._adaptive = Adaptive(k)
        self._choices: dict[str, dict[int, Choice]] = {}
        self._is_fixed = False
        self.way: Way = k - 1

    def __call__(self, n: int, caps: Caps | None = None) -> Sizes:
        """The sizes for a batch of n samples, none above its cap."""
        if self._is_fixed:
            return minimax(n, [0.0] * self._k, [1.0] * self._k, caps)
        if self.way == 0 and (caps is None or caps[0] is None or caps[0] >= n):
            return (n, *[0] * (self._k - 1))
        if 0 < self.way < self._k - 1:
            fixed, per_sample = zip(*self._adaptive.lines, strict=True)
            limits = None if caps is None else tuple(caps)
            sizes = _best_with(n, self.way, fixed, per_sample, limits)
            if sizes is not None:
                return sizes
        return self._adaptive(n, caps)

    def begin(
        self,
        kind: str,
        n: int,
        *,
        training: bool = True,
        can_be_alone: Callable[[], bool] = lambda: True,
        is_settled: Callable[[], bool] = lambda: True,
    ) -> Piece:
        """Decides which way a batch of n samples goes.

        Args:
            kind: what is done with it.
            n: how many samples it has.
            training: whether the devices' speeds are learnt from work of this kind.
            can_be_alone: whether the root may have all samples.
            is_settled: whether what has run last is done by now as it will be done later.
        """
        self._is_fixed = False
        choice, guess = self._choice_for(kind, n)

        def can(way: Way) -> bool:
            return way > 0 or can_be_alone()

        if choice is None:
            self.way = guess if can(guess) else self._k - 1
            return Piece(self.way, n)
        before = self.way
        self.way, counts = choice.begin(can, lambda way: way == 0 or is_settled())
        # What others have not done for long they begin anew, whatever it was.
        counts = counts and not (before == 0 < self.way)
        return Piece(self.way, n, counts, choice, training)

    def keep_even(self) -> None:
        """The next batch goes to all devices evenly, whatever their times."""
        self.way, self._is_fixed = self._k - 1, True

    def use_all(self) -> None:
        """The next batch goes to all devices."""
        self.way, self._is_fixed = self._k - 1, False

    def end(self, piece: Piece, seconds: float, sizes: Sizes) -> None:
        """A piece that counts took so long, with these sizes."""
        choice = piece.choice
        if choice is None or not piece.counts:
            return
        before = choice.sizes.get(piece.way, sizes)
        choice.sizes[piece.way] = sizes
        if sum(before) == sum(sizes) and _moved(before, sizes) > max(1, piece.n // OTHER):
            choice.has_changed(piece.way)
        was_examining = choice.is_examining
        choice.add(piece.way, seconds)
        if was_examining and not choice.is_examining and piece.may_propose:
            self._propose(choice, piece.n)

    def learn(self, step: StepUsage) -> None:
        """Takes in a step: what each device had, and how long it took."""
        if any(step.sizes[1:]):  # alone a device may be faster than beside others
            self._adaptive.learn(step)

    def state_dict(self) -> dict[str, Any]:
        """What has been learnt, in plain numbers."""
        choices = {
            kind: [[n, choice.state_dict()] for n, choice in own.items()]
            for kind, own in self._choices.items()
        }
        return {"k": self._k, "speeds": self._adaptive.state_dict(), "choices": choices}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where another left off; with another number of devices it begins anew."""
        if state.get("k") != self._k or "choices" not in state:
            return
        self._adaptive.load_state_dict(state["speeds"])
        for kind, own in state["choices"].items():
            for n, known in own:
                choice = self._new_choice()
                choice.load_state_dict(known)
                self._choices.setdefault(kind, {})[int(n)] = choice

    def _choice_for(self, kind: str, n: int) -> tuple[Choice | None, Way]:
        """The choice for batches of this size; or a guess, where those of other sizes tell.

        Fewer samples never need more devices.
        """
        own = self._choices.setdefault(kind, {})
        choice = own.get(n)
        if choice is None:
            near = (c for size, c in own.items() if size <= NEAR * n <= NEAR**2 * size)
            choice = next(near, None)
        if choice is not None and choice.best is not None:
            return choice, 0
        if any(size > n and other.best == 0 for size, other in own.items()):
            return None, 0
        if any(size < n and other.best == self._k - 1 for size, other in own.items()):
            return None, self._k - 1
        if choice is None:
            own[n] = choice = self._new_choice()
        return choice, 0

    def _new_choice(self) -> Choice:
        return Choice([self._k - 1, 0])

    def _propose(self, choice: Choice, n: int) -> None:
        """Has a way tried that by the cost model is better than those that were measured."""
        lines, known = self._adaptive.measured_lines, choice.seconds
        if lines is None or not {0, self._k - 1} <= set(known):
            return
        fixed, per_sample = zip(*lines, strict=True)
        nothing = [0.0] * self._k
        ends = {
            way: step_seconds(choice.sizes[way], fixed, per_sample, nothing)
            for way in known
            if way in choice.sizes
        }
        if not {0, self._k - 1} <= set(ends):
            return
        overhead = between({way: known[way] - end for way, end in ends.items()}, self._k - 1)
        best = best_active(n, fixed, per_sample, overhead)
        if step_seconds(best, fixed, per_sample, overhead) < WORTH * min(known.values()):
            choice.consider(sum(map(bool, best[1:])))


def _moved(before: Sizes, after: Sizes) -> int:
    return sum(abs(a - b) for a, b in zip(before, after, strict=True)) // 2
