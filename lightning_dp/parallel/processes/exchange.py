"""The exchange: what processes tell each other, in one round trip wherever that is possible.

Everybody sends as many bytes: a header and the payload. Skeletons (see `codec`) that everybody has
seen are not sent again. One that is new, or a payload that is too long, comes in a second round
trip; that there is one, all processes see in the same headers.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import compress, count
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from lightning_dp.parallel.processes.codec import Encoded, Room, decode, encode

_KNOWN = 256
"""How many skeletons are kept; what tells ever new ones pushes out those that nobody uses."""

_LARGEST = 2**16
"""The longest skeleton that is kept, in bytes."""

_HEADER = struct.Struct("<16sQQQQ")
_DIGEST = 16
_ASKS, _STATE = attrgetter("asks"), attrgetter("state")


class _Header(NamedTuple):
    digest: bytes  # of the skeleton
    length: int  # of the payload
    unknown: int  # length of the skeleton, 0 for one that all have seen
    asks: bool = False  # see `Exchange`
    state: int = 0


@dataclass(frozen=True)
class _Unsendable:
    """Comes in place of a value that could not be taken apart, so that nobody waits for it."""

    why: str


class Capacity:
    """How many bytes of payload everybody sends at once.

    It grows to what was told lately, and shrinks again. All processes see the same lengths, and so
    have the same capacity.

    Example:
        >>> capacity = Capacity()
        >>> capacity.bytes
        256
        >>> capacity.note([1000, 40])
        >>> capacity.bytes
        1024
    """

    LEAST, MOST = 256, 2**16
    PATIENCE = 64
    """So many times in a row less has to be enough before there is less."""

    def __init__(self) -> None:
        self.bytes = self.LEAST
        self._count = self._longest = 0

    def note(self, lengths: Sequence[int]) -> None:
        """Takes in how long the payloads of all processes were."""
        longest = max(lengths)
        if longest > self.MOST:
            return  # one that is too long whatever the capacity
        self._longest = max(self._longest, longest)
        self._count += 1
        wanted = max(self.LEAST, 1 << max(0, self._longest - 1).bit_length())
        if wanted > self.bytes or self._count == self.PATIENCE:
            self.bytes, self._count, self._longest = wanted, 0, 0


class Transport(Protocol):
    """Moves bytes between processes."""

    def all_gather(self, parts: list[Tensor], own: Tensor) -> None:
        """Gives every process the bytes of all, each of which has as many."""

    def broadcast(self, own: Tensor, src: int) -> None:
        """Gives every process the bytes of one."""


class Exchange:
    """Tells processes each other's values. All of them make the same calls in the same order.

    Args:
        rank: which of the processes this is.
        size: how many there are.
        transport: moves the bytes.

    Attributes:
        asks: whether this process asks for something that every `gather` tells the others.
        asking: the ranks that have asked, as all processes know; None if nobody has told anything
            since this was None.
        state: a number that is to be the same in all processes, told likewise.
        differs: whether it was not.
    """

    asks = differs = False
    asking: list[int] | None = None
    state = 0

    def __init__(self, rank: int, size: int, transport: Transport) -> None:
        self._rank, self._size, self._transport = rank, size, transport
        self._capacity = Capacity()
        self._most_known = max(_KNOWN, 8 * size)
        self._known: OrderedDict[bytes, bytes] = OrderedDict()  # skeletons by their digests
        self._mine, self._all = Room(1), Room(1)

    def gather(self, value: Any) -> list[Any]:
        """Every process's value, in the order of the ranks."""
        own, header = self._taken_apart(value)
        mine, everyone, stride = self._rooms()
        self._fill(mine, own, header)
        self._all_gather(mine, everyone)
        starts = range(0, self._size * stride, stride)
        headers = [_header_in(everyone, start) for start in starts]
        asking = set(self.asking or ()).union(compress(count(), map(_ASKS, headers)))
        self.asking = sorted(asking)
        self.differs |= len(set(map(_STATE, headers))) > 1
        rests = [self._rest(header) for header in headers]
        more, rest_stride = everyone, max(rests)
        if rest_stride:
            mine, more = Room(rest_stride), Room(rest_stride * self._size)
            self._fill_rest(mine, own, header)
            self._all_gather(mine, more)
        places = [_Place(everyone, starts[r], more, r * rest_stride) for r in range(self._size)]
        return self._understood(headers, places, range(self._size))

    def broadcast(self, value: Any, src: int) -> Any:
        """The value of one process in all of them; that process gets the same object again."""
        own, header = self._taken_apart(value if self._rank == src else None)
        mine, _, _ = self._rooms()
        if self._rank == src:
            self._fill(mine, own, header)
        self._transport.broadcast(mine.tensor, src)
        header = _header_in(mine, 0)
        more, rest = mine, self._rest(header)
        if rest:
            more = Room(rest)
            if self._rank == src:
                self._fill_rest(more, own, header)
            self._transport.broadcast(more.tensor, src)
        [told] = self._understood([header], [_Place(mine, 0, more, 0)], [src])
        return value if self._rank == src else told

    # What is sent

    def _taken_apart(self, value: Any) -> tuple[Encoded, _Header]:
        try:
            own = encode(value)
        except Exception as error:  # told to all, and raised in all of them
            own = encode(_Unsendable(f"{type(error).__name__}: {error}"))
        digest = blake2b(own.skeleton, digest_size=_DIGEST).digest()
        unknown = 0 if digest in self._known else len(own.skeleton)
        return own, _Header(digest, own.length, unknown, self.asks, self.state)

    def _fill(self, room: Room, own: Encoded, header: _Header) -> None:
        _HEADER.pack_into(room.memory, 0, *header)
        if header.length <= self._capacity.bytes:
            own.write(room, _HEADER.size)

    def _rest(self, header: _Header) -> int:
        """How many bytes come in the second round trip."""
        is_long = header.length > self._capacity.bytes
        return header.unknown + (header.length if is_long else 0)

    def _fill_rest(self, room: Room, own: Encoded, header: _Header) -> None:
        room.memory[: header.unknown] = own.skeleton[: header.unknown]
        if header.length > self._capacity.bytes:
            own.write(room, header.unknown)

    def _rooms(self) -> tuple[Room, Room, int]:
        stride = _HEADER.size + self._capacity.bytes
        if len(self._mine.memory) != stride:
            self._mine, self._all = Room(stride), Room(stride * self._size)
        return self._mine, self._all, stride

    def _all_gather(self, mine: Room, everyone: Room) -> None:
        parts = list(everyone.tensor.split(len(mine.memory)))
        self._transport.all_gather(parts, mine.tensor)

    # What has come

    def _understood(
        self, headers: list[_Header], places: list[_Place], ranks: Sequence[int]
    ) -> list[Any]:
        is_long = [header.length > self._capacity.bytes for header in headers]
        skeletons = list(map(self._skeleton, headers, places))
        # Before anything can go wrong with one of them: all processes are to know the same ones.
        self._keep(headers, skeletons)
        self._capacity.note([header.length for header in headers])
        values = []
        for header, place, late, skeleton in zip(headers, places, is_long, skeletons, strict=True):
            room = place.more if late else place.room
            start = place.rest + header.unknown if late else place.start + _HEADER.size
            values.append(decode(skeleton, room, start))
        _raise_unsendable(values, ranks)
        return values

    def _skeleton(self, header: _Header, place: _Place) -> bytes:
        if header.unknown:
            return bytes(place.more.memory[place.rest : place.rest + header.unknown])
        if header.digest not in self._known:
            raise RuntimeError(
                "Expected all processes to tell each other something at the same places of the "
                "program, got something that another process takes for known. Look for code that "
                "runs in some of the processes alone, and let all of them run it."
            )
        return self._known[header.digest]

    def _keep(self, headers: list[_Header], skeletons: list[bytes]) -> None:
        for header, skeleton in zip(headers, skeletons, strict=True):
            if len(skeleton) <= _LARGEST:
                self._known[header.digest] = skeleton
                self._known.move_to_end(header.digest)
        while len(self._known) > self._most_known:
            self._known.popitem(last=False)


class _Place(NamedTuple):
    """Where a process's bytes are: of the first round trip, and of the second."""

    room: Room
    start: int
    more: Room
    rest: int


def _header_in(room: Room, start: int) -> _Header:
    return _Header(*_HEADER.unpack_from(room.memory, start))


def _raise_unsendable(values: list[Any], ranks: Sequence[int]) -> None:
    for value, rank in zip(values, ranks, strict=True):
        if isinstance(value, _Unsendable):
            raise TypeError(
                f"Process {rank}: expected something that can be pickled, to be sent to the other "
                f"processes, got {value.why}. Give tensors, numbers, and objects of classes that "
                "a module has."
            )
