"""Splitting by memory: equal free memory on all devices at the peak, learnt from the steps' peaks.

No tensor and no device in here: sizes and bytes in, sizes out.
"""

from __future__ import annotations

import logging
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from lightning_dp.parallel.split.arithmetic import Sizes, minimax
from lightning_dp.parallel.split.usage import Caps, StepUsage

log = logging.getLogger("lightning_dp")

STEPS = 16
"""Latest steps that are remembered: the heaviest of their batches is the one to fit."""

SAME = 0.02
"""Relative difference of bytes below which steps are equally heavy, and devices equally full."""

Capacities: TypeAlias = Callable[[], Sequence[int]]
"""Returns for each replica the bytes that this process can have on its device."""


@dataclass(frozen=True)
class _Point:
    """A step on one device."""

    samples: int
    start: int
    peak: int


class Memory:
    """A split that leaves equally much memory free on every device.

    A device's peak is `fixed + per_sample * samples`. Fixed are weights, gradients, the
    optimizer's state and what is gathered there: usually more on the root and on the output
    device. What a sample takes is the same everywhere, since the module is. The first step is
    even; what is fixed follows from each measured peak, what a sample takes from steps of other
    sizes. `minimax` of peak minus capacity then gives equal free memory, so that a smaller or
    fuller device gets less. Where it is equal within 2 %, nothing moves any more, nor where the
    fullest device would stay as full. Replicas whose `places` are one device share its memory.

    Example:
        >>> split = Memory([0, 1], lambda: [1000, 1000])
        >>> split(20)
        (10, 10)
        >>> split.learn(StepUsage((10, 10), (1, 1), 1, (520, 400), start_bytes=(270, 150)))
        >>> split(20)  # at most 25 bytes per sample
        (8, 12)
        >>> split.learn(StepUsage((8, 12), (1, 1), 1, (480, 440), start_bytes=(270, 150)))
        >>> split(20)  # two samples less took 40 bytes less: 20 per sample
        (7, 13)
    """

    def __init__(self, places: Sequence[int], capacities: Capacities) -> None:
        self._members = [
            [k for k, place in enumerate(places) if place == device]
            for device in sorted(set(places))
        ]
        self._k = len(places)
        self._capacities = capacities
        self._steps: deque[list[_Point]] = deque(maxlen=STEPS)
        self._fixed: list[float] = []
        self._per_sample = 1.0
        self._free: list[float] = []
        self._has_told = False  # that no device counts

    def __call__(self, n: int, caps: Caps | None = None) -> Sizes:
        """The sizes for a batch of n samples, none above its cap."""
        limits = list(caps or [None] * self._k)
        if not self._free:
            return _equal(n, limits)
        rooms = [_room([limits[k] for k in members]) for members in self._members]
        used = [-free for free in self._free]
        shares = self._moved(minimax(n, used, [self._per_sample] * len(used), rooms), rooms)
        sizes = [0] * self._k
        for members, share in zip(self._members, shares, strict=True):
            own = _equal(share, [limits[k] for k in members])
            for k, size in zip(members, own, strict=True):
                sizes[k] = size
        return tuple(sizes)

    def _moved(self, shares: Sizes, rooms: Sequence[int | None]) -> Sizes:
        """These shares, or the latest ones, if the fullest device gains nothing by a move.

        Equal devices would change places else, as often as one of them has a sample more.
        """
        latest = tuple([point.samples for point in self._steps[-1]] if self._steps else [])
        fit = all([room is None or n <= room for n, room in zip(latest, rooms, strict=False)])
        if sum(latest) != sum(shares) or not fit:
            return shares
        left, before = (
            min([free - self._per_sample * n for free, n in zip(self._free, own, strict=True)])
            for own in (shares, latest)
        )
        return shares if left - before > SAME * self._per_sample else latest

    def learn(self, step: StepUsage) -> None:
        """Takes in a step: each device's samples, its bytes before the step and at its peak."""
        if not any(step.peak_bytes):
            if not self._has_told:
                log.warning(
                    "split='memory': CPU replicas share one memory, so there is nothing to learn, "
                    "and every batch is split evenly. Use split='even' on the CPU."
                )
            self._has_told = True
            return
        points = [
            _Point(sum(step.sizes[k] for k in members), step.start_bytes[i], step.peak_bytes[i])
            for members in self._members
            for i in members[:1]
        ]
        self._steps.append(points)
        if self._free and self._is_balanced(points):
            return
        self._per_sample = self._slope()
        self._fixed = [self._fixed_bytes(i) for i in range(len(points))]
        self._look_at_capacities()

    def state_dict(self) -> dict[str, Any]:
        """What has been learnt, in plain numbers."""
        return {"fixed": list(self._fixed), "per_sample": self._per_sample, "k": self._k}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where another left off; with other devices it begins anew."""
        if state.get("k") == self._k and len(state.get("fixed", ())) == len(self._members):
            self._fixed = [float(fixed) for fixed in state["fixed"]]
            self._per_sample = float(state["per_sample"])
            self._look_at_capacities()

    def _look_at_capacities(self) -> None:
        capacities = self._capacities()
        self._free = [
            capacities[members[0]] - fixed
            for members, fixed in zip(self._members, self._fixed, strict=True)
        ]

    def _is_balanced(self, points: list[_Point]) -> bool:
        """Whether no device had more left than those that worked."""
        columns = zip(self._free, self._fixed, points, strict=True)
        left = [free + fixed - p.peak for free, fixed, p in columns]
        of_workers = [rest for rest, p in zip(left, points, strict=True) if p.samples]
        return max(left) - min(of_workers) <= SAME * max(p.peak for p in points)

    def _heavy(self) -> list[list[_Point]]:
        """The steps of the heaviest batches, latest first."""
        totals = [sum(point.peak for point in points) for points in self._steps]
        heavy = [
            p for p, t in zip(self._steps, totals, strict=True) if t >= (1 - SAME) * max(totals)
        ]
        return heavy[::-1]

    def _slope(self) -> float:
        """Bytes per sample.

        From two equally heavy steps in which a device had other sizes and began with the same
        bytes. Before there are any, all that a step adds to what was there: too much, so that the
        next split moves too little and not too much.
        """
        heavy = self._heavy()
        slopes = [
            (a.peak - b.peak) / (a.samples - b.samples)
            for earlier, later in zip(heavy[1:], heavy, strict=False)
            for a, b in zip(earlier, later, strict=True)
            if a.samples != b.samples and min(a.samples, b.samples) > 0
            if abs(a.start - b.start) <= SAME * abs(a.peak - b.peak)
        ]
        added = [(p.peak - p.start) / p.samples for p in heavy[0] if p.samples]
        slope = statistics.median(slopes) if slopes else 0.0
        return max(1.0, slope if 0 < slope <= min(added) else min(added))

    def _fixed_bytes(self, i: int) -> float:
        """What device i needs besides its samples, by the latest heavy step in which it worked."""
        heavy = [points[i] for points in self._heavy()]
        point = next((point for point in heavy if point.samples), heavy[0])
        return point.peak - self._per_sample * point.samples


def _equal(n: int, caps: list[int | None]) -> Sizes:
    return minimax(n, [0.0] * len(caps), [1.0] * len(caps), caps)


def _room(caps: list[int | None]) -> int | None:
    known = [cap for cap in caps if cap is not None]
    return sum(known) if len(known) == len(caps) else None
