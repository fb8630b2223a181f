"""Lanes: copies between accelerators, on streams of their own.

A copy makes the current streams of both devices wait for each other: the source for whatever the
target is doing, and the target for whatever the source is. On a lane the copy alone waits: for the
source to be written, and for the target to be free.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
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
        self._claim(source, target, free)
        self._here.wait_stream(current_stream(self.source))
        with on_streams((self._here, self._there)):
            target.copy_(source, non_blocking=True)

    def pass_on(
        self, source: Tensor, target: Tensor, size: int, written: Sequence[torch.Event]
    ) -> list[torch.Event]:
        """Copies pieces of so many elements, each of which was written by an event, as `carry`.

        Without any, the source's current stream has written all. When each is there is returned.
        """
        self._claim(source, target)
        if not written:
            self._here.wait_stream(current_stream(self.source))
        arrived = []
        with on_streams((self._here, self._there)):
            for i, pieces in enumerate(zip(source.split(size), target.split(size), strict=True)):
                if written:
                    self._here.wait_event(written[i])
                pieces[1].copy_(pieces[0], non_blocking=True)
                arrived.append(self._there.record_event())
        return arrived

    def _claim(self, source: Tensor, target: Tensor, free: Sequence[torch.Event] = ()) -> None:
        """Is going to copy to a target, which is free as in `carry`."""
        # First: should both go before anybody waits for the copy, nobody gets their memory yet.
        source.record_stream(self._here)
        target.record_stream(self._there)
        if not free:
            self._there.wait_stream(current_stream(self.target))
        for event in free:
            self._there.wait_event(event)

    def arrive(self, later: Collection[torch.device] = ()) -> None:
        """The target's current stream goes on when all that was carried is there; or `later`."""
        if self.target not in later:
            current_stream(self.target).wait_stream(self._there)

    def left(self) -> torch.Event:
        """When all sources so far have been sent."""
        return self._here.record_event()

    def leave(self) -> None:
        """The source's current stream goes on when all sources may be written again."""
        self.release(current_stream(self.source))

    def release(self, stream: torch.Stream) -> None:
        """A stream of the source goes on when all sources so far may be written again."""
        stream.wait_stream(self._here)


@cache
def lane(source: torch.device, target: torch.device) -> Lane:
    """The one lane between two accelerators: devices have few streams."""
    return Lane(source, target)
