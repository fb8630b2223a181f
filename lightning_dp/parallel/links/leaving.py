"""Leaving: what is not packed is read where it is, and may be written again once it has left."""

from __future__ import annotations

from typing import Protocol

import torch

from lightning_dp.parallel.contexts import Lasting
from lightning_dp.parallel.links.streams import current_stream


class Way(Protocol):
    """What copies on a stream of its own."""

    def release(self, stream: torch.Stream) -> None:
        """Lets a stream of the source wait for what was copied."""


class Leaving(Lasting):
    """While it lasts, tensors leave a device from where they are.

    Then what was the current stream goes on when they have left: also after an interrupt, which
    may come while others are current.
    """

    def __init__(self, device: torch.device) -> None:
        self._home = None if device.type == "cpu" else current_stream(device)
        self._ways: list[Way] = []

    def by(self, way: Way) -> None:
        """Something is going to leave on this way."""
        self._ways.append(way)

    def begin(self) -> None:
        """Nothing has left."""

    def end(self) -> None:
        """Who writes to it next comes after."""
        for way in self._ways:
            if self._home is not None:
                way.release(self._home)
