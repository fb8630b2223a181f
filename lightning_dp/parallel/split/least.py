"""The fewest samples that a replica can work with: sizes below them are avoided.

Batch norm in training takes no shard of one sample, say. No tensor, no device in here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, product

from lightning_dp.parallel.split.arithmetic import Sizes
from lightning_dp.parallel.split.usage import Caps


def at_least(
    sizes: Sizes, least: int, caps: Caps | None = None, *, spreads: bool = False
) -> Sizes | None:
    """The sizes closest to these of which none is between 0 and `least`.

    As few samples as possible change their device, while those with enough go on. Who has too few
    gets more or nothing. What is then left over goes to those that work, in proportion to what they
    were to have; what is missing comes from those that have most. A batch that is smaller than
    `least` stays together.

    Args:
        sizes: what the devices were to have.
        least: the fewest samples of a device that works.
        caps: of each device the most samples, none below its size; None for no limit.
        spreads: whether of equally many changes those are better that leave more devices at work;
            else who was to have little gets nothing.

    Returns:
        The sizes, with the same sum; None if the caps leave no room for such sizes.

    Example:
        >>> at_least((2, 1, 1, 1), 2), at_least((7, 1), 2), at_least((1, 0), 2)
        ((3, 2, 0, 0), (8, 0), (1, 0))
        >>> at_least((7, 1), 2, spreads=True), at_least((2, 1), 2, caps=[2, 2])
        ((6, 2), None)
    """
    n = sum(sizes)
    least = min(least, n)
    limits = [math.inf if cap is None else cap for cap in caps or [None] * len(sizes)]

    def fits(working: Sequence[int]) -> bool:
        return least * len(working) <= n <= sum(limits[k] for k in working)

    def cost(working: Sequence[int]) -> tuple[int, int, int]:
        left_over = n - sum(sizes[k] for k in working)
        missing = sum(max(0, least - sizes[k]) for k in working)
        woken = sum(not sizes[k] for k in working)
        return max(left_over, missing), woken, len(working) * (-1 if spreads else 1)

    best = min(filter(fits, _choices(sizes, least, limits)), key=cost, default=None)
    return None if best is None else _shared(sizes, least, limits, best)


def _choices(sizes: Sizes, least: int, limits: Sequence[float]) -> Iterator[list[int]]:
    """Devices that may work together, best ones first wherever one may stand for another."""
    able = [k for k, limit in enumerate(limits) if limit >= least]
    # Who lacks least comes first, and then who has most room.
    order = sorted(able, key=lambda k: (-sizes[k], -limits[k]))
    enough = [k for k in order if sizes[k] >= least]
    small = [k for k in order if 0 < sizes[k] < least]
    is_tight = min(limits) < math.inf
    idle = [k for k in order if is_tight and not sizes[k]]
    for i, j in product(range(len(small) + 1), range(len(idle) + 1)):
        yield enough + small[:i] + idle[:j]
    if is_tight:  # even one who has enough may have to go
        roomy = sorted(able, key=lambda k: -limits[k])
        yield from (roomy[:i] for i in range(1, len(roomy) + 1))


def _shared(wanted: Sizes, least: int, limits: Sequence[float], working: Sequence[int]) -> Sizes:
    """All samples on the devices that work."""
    sizes = [0] * len(wanted)
    for k in working:
        sizes[k] = max(least, wanted[k])
    while sum(sizes) > sum(wanted):
        sizes[max(working, key=lambda k: (sizes[k], k))] -= 1
    while sum(sizes) < sum(wanted):
        free = (k for k in working if sizes[k] < limits[k])
        sizes[min(free, key=lambda k: ((sizes[k] + 1) / (wanted[k] or 0.5), k))] += 1
    return tuple(sizes)


def has_room(n: int, caps: Caps, least: int) -> bool:
    """Whether devices with these caps can have n samples, each at least so many or none.

    Example:
        >>> has_room(3, [2, 2], 1), has_room(3, [2, 2], 2), has_room(1, [2, 2], 2)
        (True, False, True)
    """
    least = min(least, n)
    limits = sorted((n if cap is None else cap for cap in caps), reverse=True)
    sums = accumulate(limit for limit in limits if limit >= least)
    return n == 0 or any(least * i <= n <= room for i, room in enumerate(sums, start=1))
