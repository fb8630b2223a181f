"""Leaving: what leaves a device from where it is may be written again once it has left."""

from __future__ import annotations

from typing import Protocol

import torch

from lightning_dp.parallel.contexts import Lasting
from lightning_dp.parallel.links.streams import current_stream


class Way(Protocol):
    """What copies on a stream of its own."""

    def left(self) -> torch.Event:
        """When all that was copied so far has left."""

    def release(self, stream: torch.Stream) -> None:
        """Lets a stream of the source wait for what was copied."""


class Departure:
    """Something leaves a device, or is going to."""

    _way: Way | None = None
    _left: torch.Event | None = None

    def begins(self, way: Way) -> None:
        """It is going to leave on this way."""
        self._left, self._way = None, way

    def has_begun(self) -> None:
        """All its copies are issued."""
        self._left = None if self._way is None else self._way.left()

    def release(self, stream: torch.Stream) -> None:
        """Who writes to it next, on this stream, comes after."""
        if self._left is not None:
            stream.wait_event(self._left)
        elif self._way is not None:  # interrupted: whatever goes this way has to have left
            self._way.release(stream)


class Leaving(Lasting):
    """While it lasts, tensors leave a device from where they are.

    Then what was the current stream goes on when they have left: also after an interrupt, which
    may come while others are current.
    """

    def __init__(self, device: torch.device) -> None:
        self._home = None if device.type == "cpu" else current_stream(device)
        self._departures: list[Departure] = []

    def another(self) -> Departure:
        """One more tensor is going to leave."""
        self._departures.append(Departure())
        return self._departures[-1]

    def begin(self) -> None:
        """Nothing has left."""

    def end(self) -> None:
        """Who writes to it next comes after."""
        for departure in self._departures:
            if self._home is not None:
                departure.release(self._home)
