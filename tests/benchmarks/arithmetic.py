"""What is told of times: medians, ranges, ratios, overhead and efficiency; numbers alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Summary(NamedTuple):
    """The median of some numbers, the lowest and the highest."""

    median: float
    low: float
    high: float


def summary(values: Sequence[float]) -> Summary:
    """The summary of at least one number.

    Example:
        >>> summary([3.0, 1.0, 2.0])
        Summary(median=2.0, low=1.0, high=3.0)
    """
    if not values:
        raise ValueError("Expected at least one number, got none.")
    return Summary(statistics.median(values), min(values), max(values))


def ratios(of: Sequence[float], to: Sequence[float]) -> Summary:
    """How much longer one takes than another, round by round.

    The two of a round were measured one after another, when the machine was as busy for both. So
    ratios vary less than times.

    Example:
        >>> ratios([1.0, 4.0, 2.0], [2.0, 4.0, 2.0])
        Summary(median=1.0, low=0.5, high=1.0)
    """
    if len(of) != len(to):
        raise ValueError(f"Expected as many rounds of both, got {len(of)} and {len(to)}.")
    return summary([a / b for a, b in zip(of, to, strict=True)])


def overhead(of: Sequence[float], share: Sequence[float]) -> Summary:
    """Seconds beyond those of one device alone with its share of the batch; below 0: less."""
    if len(of) != len(share):
        raise ValueError(f"Expected as many rounds of both, got {len(of)} and {len(share)}.")
    return summary([a - b for a, b in zip(of, share, strict=True)])


def efficiency(
    one: Sequence[float], several: Sequence[float], devices: int, *, separate: bool
) -> Summary:
    """How much of what could be gained was gained; 1 is all of it.

    Devices that are separate could be as many times as fast as one. Replicas on the CPU have the
    cores that one device has alone, too, and could be as fast.

    Example:
        >>> efficiency([8.0], [2.5], 4, separate=True).median
        0.8
        >>> efficiency([8.0], [8.0], 4, separate=False).median
        1.0
    """
    times = ratios(one, several)
    best = devices if separate else 1
    return Summary(*(value / best for value in times))


def steps_for(seconds: float, step: float, least: int = 2, most: int = 500) -> int:
    """Steps that take about so many seconds.

    Example:
        >>> [steps_for(0.5, step) for step in (0.1, 2.0, 1e-9)]
        [5, 2, 500]
    """
    if not step > 0:
        return most
    return min(max(math.ceil(seconds / step), least), most)


def in_turns(names: Sequence[str], round_: int) -> list[str]:
    """Who comes when in a round: each round begins with another one.

    Example:
        >>> in_turns(["a", "b", "c"], 1)
        ['b', 'c', 'a']
    """
    first = round_ % max(len(names), 1)
    return [*names[first:], *names[:first]]
