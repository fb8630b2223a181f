"""Caps: how many samples each device can take, learnt from steps that did not fit. Pure ints."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_dp.parallel.split.arithmetic import Sizes, minimax
from lightning_dp.parallel.split.usage import Caps

MARGIN = 8
"""A device that failed with n samples gets n / 8 less the next time."""


class Capacity:
    """What fits on the devices, as far as steps have shown.

    Args:
        k: the number of devices.

    Example:
        >>> capacity = Capacity(2)
        >>> capacity.record_oom((32, 32), [1])
        >>> capacity.within((32, 32)), capacity.within((1, 2))
        ((36, 28), (1, 2))
    """

    def __init__(self, k: int) -> None:
        self._fits = [0] * k
        self._fails: list[int | None] = [None] * k
        self._latest: Sizes = ()

    @property
    def caps(self) -> Caps | None:
        """Of each device the most samples to give it, None for no limit; None if all have none."""
        if not any(self._fails):
            return None
        return [
            None if fails is None else max(fits, fails - max(1, fails // MARGIN))
            for fits, fails in zip(self._fits, self._fails, strict=True)
        ]

    @property
    def fits(self) -> Sizes:
        """The most samples that each device is known to take."""
        return tuple(self._fits)

    def record_success(self, sizes: Sequence[int]) -> None:
        """A step with these sizes was done."""
        self._fits = list(map(max, self._fits, sizes))
        self._latest = tuple(sizes)

    def record_oom(self, sizes: Sequence[int], devices: Sequence[int]) -> None:
        """In a step with these sizes, these devices ran out of memory.

        Batches differ, and the heaviest is to fit: that so many fitted earlier counts no more.
        """
        self._latest = ()
        for k in devices:
            self._fails[k] = min(sizes[k], self._fails[k] or sizes[k])
            self._fits[k] = min(self._fits[k], sizes[k] - 1)

    def has_room(self, n: int) -> bool:
        """Whether the caps leave room for n samples."""
        caps = self.caps or [None]
        return None in caps or sum(cap or 0 for cap in caps) >= n

    def within(self, wanted: Sizes) -> Sizes:
        """Sizes as wanted, but none above its cap; the others share what is left over.

        They do in proportion to what they were to have; who was to have nothing comes last.
        """
        caps = self.caps
        if caps is None or all(c is None or n <= c for n, c in zip(wanted, caps, strict=True)):
            return wanted
        per_sample = [1 / n if n else float("inf") for n in wanted]
        return minimax(sum(wanted), [0.0] * len(wanted), per_sample, caps)

    def trial(self, n: int) -> Sizes | None:
        """Sizes, of n samples at most, that tell most about what fits; None if all is known.

        Halves for each device the range between what fits and what does not; at last, all that
        has fitted on some device is tried at once. The sum may be less than n.
        """
        sizes, left = [], n
        for fits, fails in zip(self._fits, self._fails, strict=True):
            known = fails is None or fails - fits <= 1
            size = fits if known or fails is None else (fits + fails) // 2
            sizes.append(min(size, left))
            left -= sizes[-1]
        is_news = any(map(int.__gt__, sizes, self._fits)) or self._latest != tuple(sizes)
        return tuple(sizes) if is_news and any(sizes) else None
