"""The speed of each device: what its ops take."""

from __future__ import annotations

import math

from sim_devices import attached
from sim_devices.attached import DeviceLike, index_of


def set_speed(
    device: DeviceLike,
    *,
    seconds_per_op: float = 0.0,
    seconds_per_element: float = 0.0,
    flops_per_second: float = math.inf,
    bytes_per_second: float = math.inf,
) -> None:
    """Make every op on ``device`` take longer, to study imbalance.

    Each takes ``seconds_per_op + seconds_per_element * (elements of its outputs)``, and the longer
    one of ``flops / flops_per_second`` and ``bytes / bytes_per_second``: of its floating point
    operations, and of what it reads and writes. Views cost nothing. On virtual time (``set_clock``)
    that is computed. On the wall's it is waited, on top of the CPU's own time. The wait leaves
    Python and the cores free, so that devices driven from several threads overlap, and a slow
    device is slow. Short waits are collected and slept in one go of at least 200 microseconds, at
    ``synchronize`` and wherever the host reads a result (``item``, copies to another device): sums
    are right, single ops may look free. Without arguments: full speed again.

    Args:
        device: the device.
        seconds_per_op: seconds for every op.
        seconds_per_element: seconds for every element of an op's outputs.
        flops_per_second: operations of matrix products and convolutions; all else has one for each
            element.
        bytes_per_second: the speed of the device's memory.
    """
    if min(seconds_per_op, seconds_per_element) < 0:
        raise ValueError(
            "set_speed: expected seconds of at least 0, "
            f"got seconds_per_op={seconds_per_op}, seconds_per_element={seconds_per_element}."
        )
    rates = flops_per_second, bytes_per_second
    if not min(rates) > 0:
        raise ValueError(
            "set_speed: expected rates of more than 0, "
            f"got flops_per_second={flops_per_second}, bytes_per_second={bytes_per_second}."
        )
    limits = (0.0 if math.isinf(rate) else rate for rate in rates)
    index = index_of(device)
    attached.extension.set_speed(index, seconds_per_op, seconds_per_element, *limits)


def get_speed(device: DeviceLike = None) -> tuple[float, float]:
    """Return seconds per op and per element of ``device``, as set by ``set_speed``."""
    seconds_per_op, seconds_per_element = attached.extension.speed(index_of(device))
    return seconds_per_op, seconds_per_element


def busy_seconds(device: DeviceLike = None) -> float:
    """Return the simulated clock of ``device``: what its ops have taken by ``set_speed`` so far.

    Without a speed it stands still. Differences of it are exact, unlike the time on a wall.
    """
    return float(attached.extension.busy_seconds(index_of(device)))
