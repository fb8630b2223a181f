"""Whether fewer devices would be faster, by what is seen of an even split. Numbers alone.

Nothing is tried: an even split stays as it is. So this is an upper bound for one device, and it is
told where even that is far below what the step takes.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from lightning_dp.parallel.split.arithmetic import Sizes

SURE = 0.75
"""Share of the shortest step with all devices below which one device is certainly faster."""

ENOUGH = 5
"""Steps of one batch size before anything is said."""

SMALLER = 5
"""Steps with a smaller batch, the shortest of which tells what of a step is fixed."""


class Verdict(NamedTuple):
    """What a step takes with all devices, and at most with one, in seconds."""

    together: float
    alone: float


class FewerDevices:
    """Bounds what one device would take for a batch, from replicas that ran one after another.

    Together these do what one device does, and what is fixed in a step as often as there are
    replicas. How much that is follows from smaller batches, such as the last ones of epochs; before
    there are some, nothing counts as fixed.

    Example:
        >>> devices = FewerDevices()
        >>> for n in [8] * 5 + [4] * 5:
        ...     devices.add((n // 2, n // 2), 2 * 1.0 + 0.01 * n, 2.5)
        >>> round(devices.verdict().alone, 2)
        1.08
    """

    def __init__(self) -> None:
        self._work: dict[tuple[int, int], list[float]] = defaultdict(list)
        self._steps: dict[tuple[int, int], list[float]] = defaultdict(list)

    def add(self, sizes: Sizes, busy: float | None, seconds: float) -> None:
        """A step took so long, and its replicas together so long one after another.

        None where they ran at the same time: then they were in each other's way.
        """
        key = sum(sizes), sum(map(bool, sizes))
        self._steps[key].append(seconds)
        if busy is not None:
            self._work[key].append(busy)

    def verdict(self) -> Verdict | None:
        """Both times, if one device is certainly faster for the batches that come most often."""
        key = max(self._steps, key=lambda key: len(self._steps[key]), default=(0, 0))
        if key[1] < 2 or min(len(self._steps[key]), len(self._work.get(key, ()))) < ENOUGH:
            return None
        alone = min(self._bounds(*key))
        if alone >= SURE * min(self._steps[key]):
            return None
        return Verdict(statistics.median(self._steps[key]), alone)

    def _bounds(self, n: int, active: int) -> Sequence[float]:
        work = min(self._work[n, active])  # noise only adds
        bounds = [work]
        for (smaller, same), times in self._work.items():
            if same == active and smaller <= SURE * n and len(times) >= SMALLER:
                per_sample = max(0.0, (work - min(times)) / (n - smaller))
                fixed = max(0.0, work - per_sample * n) / active
                bounds.append(work - (active - 1) * fixed)
        return bounds
