"""Routes: who sends to whom. Devices alone: nothing is copied here."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeVar

Device = TypeVar("Device", bound=Hashable)


def chain(devices: Sequence[Device]) -> list[Device]:
    """The devices that a sum passes on its way to the first one: the last one begins.

    Each of them gets, and each sends, as much as the sum is, and that once. What the first one has
    for all others goes the same way back.

    Example:
        >>> chain(["root", "one", "two", "one"])
        ['two', 'one', 'root']
    """
    return [*dict.fromkeys(devices)][::-1]
