"""split="memory": equal free memory on all devices at the peak, learnt from the steps' peaks."""

from __future__ import annotations

import logging
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

from lightning_dp.parallel.split.arithmetic import Caps, Sizes, minimax
from lightning_dp.parallel.split.usage import StepUsage

log = logging.getLogger("lightning_dp")

STEPS = 16
"""Latest steps that are kept: the split is for the heaviest of their batches."""

SAME = 0.02
"""Relative difference of bytes below which steps are equally heavy, and devices equally full."""

Capacities: TypeAlias = Callable[[], Sequence[int]]
"""Returns for each replica the bytes that this process can have on its device."""


class _Step(NamedTuple):
    """What one device did in a step."""

    samples: int
    start: int  # bytes in use
    peak: int


class Memory:
    """A split that leaves equally much memory free on every device.

    A device's peak is `fixed + per_sample * samples`. Fixed are weights, gradients, the optimizer's
    state and gathered outputs: usually more on the root. What a sample takes is the same
    everywhere, since the module is. The first step is even. `minimax` of peak minus capacity gives
    equal free memory, so a smaller or fuller device gets less. Replicas whose `places` are the same
    number share one device's memory.

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
        self._replicas = [
            [k for k, place in enumerate(places) if place == device]
            for device in sorted(set(places))
        ]
        self._k = len(places)
        self._capacities = capacities
        self._steps: deque[list[_Step]] = deque(maxlen=STEPS)  # of each device
        self._per_sample = 1.0
        self._fixed: list[float] = []  # of each device; empty until a step was measured
        self._free: list[float] = []  # capacity - fixed
        self._has_warned = False

    def __call__(self, n: int, caps: Caps | None = None) -> Sizes:
        """The sizes for a batch of n samples, none above its cap."""
        limits = [n if cap is None else min(n, cap) for cap in caps or [None] * self._k]
        if not self._free:
            return _equal(n, limits)
        rooms = [sum(limits[k] for k in replicas) for replicas in self._replicas]
        used = [-free for free in self._free]
        shares = minimax(n, used, [self._per_sample] * len(used), rooms)
        latest = tuple(step.samples for step in self._steps[-1]) if self._steps else ()
        fits = sum(latest) == n and all(map(int.__le__, latest, rooms))
        if fits and not self._is_better(shares, latest):
            shares = latest
        sizes = [0] * self._k
        for replicas, share in zip(self._replicas, shares, strict=True):
            for k, size in zip(replicas, _equal(share, [limits[k] for k in replicas]), strict=True):
                sizes[k] = size
        return tuple(sizes)

    def learn(self, step: StepUsage) -> None:
        """Takes in a training step: each device's samples, its bytes before it and at its peak."""
        if not any(step.peak_bytes):
            if not self._has_warned:
                log.warning(
                    "split='memory': CPU replicas share one memory, so there is nothing to learn, "
                    "and every batch is split evenly. Use split='even' on the CPU."
                )
            self._has_warned = True
            return
        devices = [
            _Step(sum(step.sizes[k] for k in ks), step.start_bytes[ks[0]], step.peak_bytes[ks[0]])
            for ks in self._replicas
        ]
        self._steps.append(devices)
        if self._free and self._is_balanced(devices):
            return
        heavy = self._heaviest()
        self._per_sample = _bytes_per_sample(heavy)
        self._fixed = []
        for i in range(len(devices)):
            latest = next((s[i] for s in heavy if s[i].samples), heavy[0][i])
            self._fixed.append(latest.peak - self._per_sample * latest.samples)
        self._read_capacities()

    def state_dict(self) -> dict[str, Any]:
        """What has been learnt, in plain numbers."""
        return {"fixed": list(self._fixed), "per_sample": self._per_sample, "k": self._k}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues with what another one has learnt, unless it had other devices."""
        if state.get("k") == self._k and len(state.get("fixed", ())) == len(self._replicas):
            self._fixed = [float(fixed) for fixed in state["fixed"]]
            self._per_sample = float(state["per_sample"])
            self._read_capacities()

    def _read_capacities(self) -> None:
        capacities = self._capacities()
        own = [capacities[replicas[0]] for replicas in self._replicas]
        self._free = [all_ - fixed for all_, fixed in zip(own, self._fixed, strict=True)]

    def _is_better(self, shares: Sizes, latest: Sizes) -> bool:
        """Whether other shares leave the fullest device less full, or all more even.

        Otherwise equal devices would change places, as often as one has a sample more.
        """
        after, before = (
            [free - self._per_sample * n for free, n in zip(self._free, sizes, strict=True)]
            for sizes in (shares, latest)
        )
        least, spread = SAME * self._per_sample, max(before) - min(before)
        return min(after) - min(before) > least or spread - (max(after) - min(after)) > least

    def _is_balanced(self, devices: list[_Step]) -> bool:
        """Whether no device had more memory left at its peak than those that worked."""
        columns = zip(self._free, self._fixed, devices, strict=True)
        left = [free + fixed - step.peak for free, fixed, step in columns]
        working = [rest for rest, step in zip(left, devices, strict=True) if step.samples]
        return max(left) - min(working) <= SAME * max(step.peak for step in devices)

    def _heaviest(self) -> list[list[_Step]]:
        """The steps of the heaviest batches, latest first."""
        total = [sum(step.peak for step in devices) for devices in self._steps]
        least = (1 - SAME) * max(total)
        return [s for s, t in zip(self._steps, total, strict=True) if t >= least][::-1]


def _bytes_per_sample(steps: list[list[_Step]]) -> float:
    """Of steps of equally heavy batches, latest first.

    By two steps in which a device had other sizes and began with the same bytes. Before there are
    any, all that a step adds: that is too much, so the next split moves too little.
    """
    slopes = [
        (a.peak - b.peak) / (a.samples - b.samples)
        for later, earlier in pairwise(steps)
        for a, b in zip(later, earlier, strict=True)
        if a.samples != b.samples and min(a.samples, b.samples) > 0
        if abs(a.start - b.start) <= SAME * abs(a.peak - b.peak)
    ]
    added = min((s.peak - s.start) / s.samples for s in steps[0] if s.samples)
    slope = statistics.median(slopes) if slopes else 0.0
    return max(1.0, slope if 0 < slope <= added else added)


def _equal(n: int, caps: Sequence[int]) -> Sizes:
    return minimax(n, [0.0] * len(caps), [1.0] * len(caps), caps)
