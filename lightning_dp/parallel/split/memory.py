"""split="memory": samples by the devices' free memory, as the peaks of training steps show it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

from lightning_dp.parallel.split.adaptive import StepUsage
from lightning_dp.parallel.split.arithmetic import Sizes, even, minimax

log = logging.getLogger("lightning_dp")

Capacities: TypeAlias = Callable[[], Sequence[int]]
"""Returns for each replica the bytes that this process can have on its device."""

KEPT_STEPS = 16  # latest steps that are kept: the split is for the heaviest of their batches
SAME = 0.02  # relative difference below which steps are equally heavy, and shares equally good


class Memory:
    """A split that leaves equally much memory free on every device.

    A device's peak is `fixed + per_sample * samples`. Fixed are weights, gradients, the optimizer's
    state and gathered outputs: usually more on the root. `per_sample` is the same everywhere, since
    the module is: the least that a device added per sample in the heaviest of the latest 16 steps.
    What is left of that step's peaks is `fixed`. `minimax` of peak minus capacity then gives equal
    free memory. All that a step adds counts as its samples', so each split moves too few samples
    rather than too many. The first step is even. Replicas of one place share a device's memory.

    Example:
        >>> split = Memory([0, 1], lambda: [1000, 1000])
        >>> split(20)
        (10, 10)
        >>> split.learn(StepUsage((10, 10), (1, 1), 1, (520, 400), start_bytes=(270, 150)))
        >>> split(20)  # at most 25 bytes per sample
        (8, 12)
    """

    def __init__(self, places: Sequence[int], capacities: Capacities) -> None:
        self._k, self._capacities = len(places), capacities
        self._replicas = [
            [k for k, place in enumerate(places) if place == device]
            for device in sorted(set(places))
        ]
        self._steps: deque[StepUsage] = deque(maxlen=KEPT_STEPS)
        self._per_sample = 1.0
        self._used: list[float] = []  # of each device, fixed - capacity; empty until measured
        self._shares: Sizes = ()  # of each device in the latest split
        self._has_warned = False

    def __call__(self, n: int) -> Sizes:
        """The sizes for a batch of n samples."""
        if not self._used:
            return even(n, self._k)
        shares = minimax(n, self._used, [self._per_sample] * len(self._used))
        # Otherwise equal devices would change places, as often as one has a sample more.
        kept = self._shares if sum(self._shares) == n else shares
        if self._fullest(kept) - self._fullest(shares) > SAME * self._per_sample:
            kept = shares
        self._shares = kept
        sizes = [0] * self._k
        for replicas, share in zip(self._replicas, kept, strict=True):
            for k, size in zip(replicas, even(share, len(replicas)), strict=True):
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
        self._steps.append(step)
        heaviest = max(sum(step.peak_bytes) for step in self._steps)
        heavy = [s for s in self._steps if sum(s.peak_bytes) >= (1 - SAME) * heaviest][-1]
        roots = [replicas[0] for replicas in self._replicas]
        samples = [sum(heavy.sizes[k] for k in replicas) for replicas in self._replicas]
        self._per_sample = max(
            1.0,
            min(
                (heavy.peak_bytes[k] - heavy.start_bytes[k]) / n
                for k, n in zip(roots, samples, strict=True)
                if n
            ),
        )
        capacities = self._capacities()
        self._used = [
            heavy.peak_bytes[k] - self._per_sample * n - capacities[k]
            for k, n in zip(roots, samples, strict=True)
        ]

    def _fullest(self, shares: Sizes) -> float:
        """How little memory the fullest device has left, negated."""
        return max(used + self._per_sample * n for used, n in zip(self._used, shares, strict=True))
