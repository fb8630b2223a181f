"""Lanes: copies between accelerators, on streams of their own.

A copy makes the current streams of both devices wait for each other: the source for whatever the
target is doing, and the target for whatever the source is. On a lane the copy alone waits: for the
source to be written, and for the target to be free.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from lightning_dp.parallel.links.streams import current_stream, on_streams


class Lane:
    """The way from one accelerator to another: a stream at each end that nothing else uses."""

    def __init__(self, source: torch.device, target: torch.device) -> None:
        self.source, self.target = source, target
        self._here, self._there = torch.Stream(source), torch.Stream(target)

    def carry(self, source: Tensor, target: Tensor, free: Sequence[torch.Event] = ()) -> None:
        """Copies what the source's current stream has written, to memory that stays.

        The target is free from these events on, or else after all that its current stream was told.
        """
        self.begin(source, target, free)
        self.follow()
        self.copy(source, target)

    def begin(self, source: Tensor, target: Tensor, free: Sequence[torch.Event] = ()) -> None:
        """Parts of the source are to be copied; the target is free as in `carry`."""
        # First: should both go before anybody waits for the copy, nobody gets their memory yet.
        source.record_stream(self._here)
        target.record_stream(self._there)
        if not free:
            self._there.wait_stream(current_stream(self.target))
        for event in free:
            self._there.wait_event(event)

    def follow(self) -> None:
        """What is copied from here on has been written by the source's current stream."""
        self._here.wait_stream(current_stream(self.source))

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copies when the target is free, and the lane through with what it was told to follow."""
        with on_streams((self._here, self._there)):
            target.copy_(source, non_blocking=True)

    def pass_on(self, source: Tensor, target: Tensor, brought_by: Lane) -> None:
        """Copies what another lane brings to this one's source, as soon as it is there."""
        self._here.wait_stream(brought_by._there)
        self.copy(source, target)

    def arrive(self) -> None:
        """The target's current stream goes on when all that was carried is there."""
        current_stream(self.target).wait_stream(self._there)

    def left(self) -> torch.Event:
        """When all sources so far have been sent."""
        return self._here.record_event()

    def leave(self) -> None:
        """The source's current stream goes on when all sources may be written again."""
        current_stream(self.source).wait_stream(self._here)


@cache
def lane(source: torch.device, target: torch.device) -> Lane:
    """The one lane between two accelerators: devices have few streams."""
    return Lane(source, target)
