"""Overlap: how much of what gradients take on their way a backward hides."""

from __future__ import annotations

from collections.abc import Sequence


def exposed(stages: Sequence[float], buckets: int, backward: float) -> float:
    """Seconds after a backward until the last bucket of gradients has been through all stages.

    The backward fills equal buckets one after another, each in as much time. A bucket goes through
    the stages in order, and a stage has one bucket at a time. As all buckets are alike, the longest
    stage never waits once it has begun, or the last bucket finds all stages empty: the end is the
    later of both. So at least the last bucket's own way remains, however long the backward is.

    Args:
        stages: the seconds of a bucket in each.
        buckets: how many there are, at least 1.
        backward: its seconds; 0 where gradients leave after it.

    Example:
        >>> exposed([1.0, 2.0], buckets=4, backward=100.0)
        3.0
        >>> exposed([1.0, 2.0], buckets=4, backward=0.0)
        9.0
    """
    if not stages:
        return 0.0
    late = (buckets - 1) * (max(stages) - backward / buckets)
    return sum(stages) + max(0.0, late)


def exposed_ahead(stage: float, layers: int, forward: float) -> float:
    """Seconds by which a forward is longer whose layers arrive one after another.

    The same the other way round: no layer begins before it is there. The first one's way is never
    hidden.

    Example:
        >>> exposed_ahead(1.0, 4, 100.0), exposed_ahead(30.0, 4, 100.0)
        (1.0, 45.0)
    """
    return exposed([stage], layers, forward)
