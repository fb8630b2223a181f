"""Relay: what is packed on one accelerator goes out to others through pinned memory of the host.

Where accelerators have no access to each other's memory, every copy between them goes through the
host's. Down a chain it would go in and out once for each device, and from the root to each it would
leave the root as often. By the relay it leaves once, and all others read it there at once.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from itertools import cycle

import torch
from torch import Tensor

from lightning_dp.parallel.links.streams import current_stream, on_streams, own_stream

PIECE_BYTES = 4 * 2**20
"""Copied at a time. All of 100 MB are there soonest with pieces of 4.4 MB, on links of 26 GB/s that
take 7.5 us before the first byte: `sqrt(bytes * rate * seconds)`, the least of what all pieces take
to leave, and the last one to be read."""

_SLOTS = 4
"""Pieces in the host's memory: two under way, and two for links that are not as fast as others."""


class Relay:
    """The way from one accelerator to others, into memory that stays there."""

    def __init__(self, source: torch.device) -> None:
        self._source = source
        self._out = own_stream(source, "to the host")
        self._in: dict[torch.device, torch.Stream] = {}
        self._slots = [_Slot() for _ in range(_SLOTS)]
        self._turns = cycle(self._slots)
        self._is_refused = False

    def prepare(self, size: int) -> bool:
        """Takes the host's memory for so many bytes on their way; whether it could be pinned."""
        if not self._is_refused:
            try:
                for slot in self._slots:
                    slot.hold(min(size, PIECE_BYTES))
            except RuntimeError as error:  # torch has no error of its own for what is not pinned
                self._is_refused = True
                _tell(error)
        return not self._is_refused

    def carry(self, here: Tensor, targets: Sequence[Tensor]) -> list[torch.Event]:
        """Issues the copies of what the current stream of `here` has written; when each is there.

        Nothing is written before the target's current stream is through with what it was told.
        There is memory for them, see `prepare`.
        """
        here, *targets = [tensor.view(torch.uint8) for tensor in (here, *targets)]
        here.record_stream(self._out)
        self._out.wait_stream(current_stream(self._source))
        for target in targets:
            self._in[target.device] = way = own_stream(target.device, "from the host")
            target.record_stream(way)
            way.wait_stream(current_stream(target.device))
        pieces = [tensor.split(PIECE_BYTES) for tensor in (here, *targets)]
        arrived: list[torch.Event] = []
        for piece, *there in zip(*pieces, strict=True):
            arrived = self._pass(piece, there)
        return arrived

    def _pass(self, piece: Tensor, targets: Sequence[Tensor]) -> list[torch.Event]:
        slot = next(self._turns)
        memory = slot.claim(piece, self._out, [*self._in.values()])
        with on_streams([self._out]):
            memory.copy_(piece, non_blocking=True)
        filled, read = self._out.record_event(), []
        for target in targets:
            way = self._in[target.device]
            way.wait_event(filled)
            with on_streams([way]):
                target.copy_(memory, non_blocking=True)
            read.append(way.record_event())
        slot.read = read  # last: an interrupt may come in between
        return read

    def arrive(self, later: Collection[torch.device] = ()) -> None:
        """The targets' current streams go on when all that was carried is there; some `later`."""
        for device, way in self._in.items():
            if device not in later:
                current_stream(device).wait_stream(way)

    def left(self) -> torch.Event:
        """When all that was carried so far has left."""
        return self._out.record_event()

    def leave(self) -> None:
        """The source's current stream goes on when all that was carried may be written again."""
        self.release(current_stream(self._source))

    def release(self, stream: torch.Stream) -> None:
        """A stream of the source goes on when all that was carried may be written again."""
        stream.wait_stream(self._out)


class _Slot:
    """Pinned memory for one piece at a time."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.read: list[torch.Event] | None = []  # when all have; None: not known

    def hold(self, size: int) -> None:
        """Has room for so many bytes. What is under way keeps the memory that was there before."""
        if self._memory.numel() < size:
            self._memory = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def claim(self, piece: Tensor, way: torch.Stream, readers: Sequence[torch.Stream]) -> Tensor:
        """Memory for a piece, to which a stream may write when all have read what was there."""
        for event in self.read or ():
            way.wait_event(event)
        for reader in readers if self.read is None else ():
            way.wait_stream(reader)
        self.read = None
        return self._memory[: piece.numel()]


def _tell(error: RuntimeError) -> None:
    warnings.warn(
        f"Expected to pin {_SLOTS} times {PIECE_BYTES} bytes of the host's memory at most, through "
        f"which all devices get their parameters at once, got: {error}. They pass them on from one "
        "to the next instead, which takes longer. Let this process lock more memory (ulimit -l).",
        stacklevel=2,
    )
