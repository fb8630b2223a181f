"""Routes: who sends to whom, and in which pieces. Nothing is copied here."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from itertools import pairwise
from typing import TypeVar

import torch

Device = TypeVar("Device", bound=Hashable)

_LAG = {True: 52_000, False: 390_000}
"""What a link could carry until a copy's first byte arrives, in bytes: its rate times its seconds.

Of PCI Express 4.0 with 16 lanes, between devices that have access to each other and others: 26 GB/s
and 2 or 15 us, from where `lightning_dp.sim.links.PRESETS` has them.
"""

_MOST_PIECES = 8  # more take the host longer to issue than links to carry


def chain(devices: Sequence[Device]) -> list[Device]:
    """The devices that a sum passes on its way to the first one: the last one begins.

    Each of them gets, and each sends, as much as the sum is, and that once. What the first one has
    for all others goes the same way back.

    Example:
        >>> chain(["root", "one", "two", "one"])
        ['two', 'one', 'root']
    """
    return [*dict.fromkeys(devices)][::-1]


def have_access(devices: Sequence[torch.device]) -> bool:
    """Whether accelerators copy to each other directly, each to the next one of a chain.

    Where torch cannot say, they seem to.
    """
    ask = getattr(torch.get_device_module(devices[0]), "can_device_access_peer", None)
    return ask is None or all([ask(*ends) for ends in pairwise(devices)])


def piece_bytes(size: int, links: int, *, direct: bool) -> int:
    """Of what has to pass some links one after another, the bytes that pass at a time.

    All of n pieces have passed after `(n + links - 1) * (seconds + size / n / rate)`, which is
    least for `n = sqrt((links - 1) * size / (rate * seconds))`.

    Args:
        size: bytes in all, at least 1.
        links: how many, at least 1: with one there is nothing to gain.
        direct: whether these are between devices that have access to each other's memory.

    Example:
        >>> [2**22 // piece_bytes(2**22, links, direct=False) for links in (1, 2, 3, 7)]
        [1, 3, 4, 8]
    """
    pieces = math.sqrt((links - 1) * size / _LAG[direct])
    return math.ceil(size / min(_MOST_PIECES, max(1, pieces)))
