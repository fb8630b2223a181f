"""Summing: tensors of several devices are added up on their way to the first one of these.

Each bucket goes down a chain of the devices, see `routes`. A device adds its own to what arrives,
and sends that on. So the order of addition follows from the devices alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, count
from typing import TypeAlias, TypeGuard, cast

import torch
from torch import Tensor

from lightning_dp.parallel.links.buckets import Bucket, kind
from lightning_dp.parallel.links.lanes import lane
from lightning_dp.parallel.links.leaving import Leaving
from lightning_dp.parallel.links.routes import chain, have_access, piece_bytes
from lightning_dp.parallel.links.streams import are_accelerators, current_stream
from lightning_dp.parallel.torch_private import add_as_read, add_to_each, copy_to_each

WINDOW_BYTES = 32 * 2**20
"""Sums on their way take this much on each device: as many buckets as fit are under way at once."""

Row: TypeAlias = Sequence[Tensor]
"""The tensors of a bucket, or of a piece, that one replica has."""

_PAGE = 4096  # bytes; less is never cut

_PLAIN = frozenset([Tensor])


class Summing:
    """Adds up tensors of fixed kinds, bucket by bucket.

    A tensor larger than a bucket passes in pieces. Where a device has no memory left to pass
    through, tensors travel one by one.
    """

    def __init__(self, buckets: Sequence[Bucket], bucket_bytes: int) -> None:
        self._buckets = buckets
        shared = [bucket.bytes for bucket in buckets if len(bucket.positions) > 1]
        self._most = max([_PAGE, bucket_bytes, *shared])  # bytes of a piece
        self._links = 0  # of the longest chain so far
        self._windows: dict[torch.device, _Window | None] = {}
        self._is_at_work = False  # or was interrupted
        self.cut(1)

    def cut(self, links: int, *, direct: bool = True) -> None:
        """Cuts buckets into pieces for a chain of so many links, see `routes.piece_bytes`.

        A backward fills the first bucket last, so the step waits until it has passed all links. The
        pieces of others have at most as many bytes as all buckets before them: they leave that much
        earlier.
        """
        self._links, first = links, piece_bytes(self._most, links, direct=direct)
        before = accumulate([0, *[bucket.bytes for bucket in self._buckets]])
        # In the order in which a backward fills buckets, the last one first: pieces that are under
        # way at once are then in slots of their own.
        numbers, order = count(), [*zip(self._buckets, before, strict=False)][::-1]
        self._pieces = [
            self._cut(bucket, max(_PAGE, first, size), numbers) for bucket, size in order
        ][::-1]

    def _cut(self, bucket: Bucket, most: int, numbers: count[int]) -> list[_Piece]:
        """The pieces of a bucket: of at most so many bytes, where it is one tensor."""
        most = min(self._most, most)
        if bucket.bytes <= most or len(bucket.positions) > 1:
            return [_Piece(next(numbers), bucket)]
        elements = range(bucket.length)
        step = most // bucket.dtype.itemsize
        parts = [elements[start : start + step] for start in elements[::step]]
        return [_Slice(next(numbers), bucket, part) for part in parts]

    def prepare(self, devices: Sequence[torch.device]) -> bool:
        """Takes the memory through which sums pass on the devices; whether each has room for it."""
        stops = chain(devices)
        if len(stops) - 1 > self._links:
            self._settle()
            self._windows.clear()
            self.cut(len(stops) - 1, direct=are_accelerators(*stops) and have_access(stops))
        for device in stops:
            if device not in self._windows:
                self._windows[device] = self._window(device)
        return all([self._windows[device] is not None for device in stops])

    def _window(self, device: torch.device) -> _Window | None:
        try:
            return _Window(device, [piece for own in self._pieces[::-1] for piece in own])
        except torch.OutOfMemoryError:
            return None

    def add(
        self, sums: Sequence[Tensor | None], terms: Sequence[Sequence[Tensor | None]]
    ) -> set[int]:
        """Adds the terms of each replica to sums, in place; the positions that it has added up.

        The sums are on one device. Left out are buckets of which a replica has a part, or other
        kinds, or which have no sum to add to. A replica may have nothing of a bucket.
        """
        done: set[int] = set()
        first = [next((t for t in row if t is not None), None) for row in (sums, *terms)]
        devices = [tensor.device for tensor in first if tensor is not None]
        # First: what is whole depends on how buckets are cut.
        has_room = len({*devices}) < 2 or self.prepare(devices)
        for j, bucket in enumerate(self._buckets):
            total, *others = [bucket.of(row) for row in (sums, *terms)]
            rows = [total, *[row for row in others if not all([t is None for t in row])]]
            if self._are_whole(j, rows):
                self._add_bucket(j, cast(list[Row], rows), has_room)
                done |= bucket.positions
        return done

    def _are_whole(self, j: int, rows: Sequence[Sequence[Tensor | None]]) -> bool:
        return all([self.is_whole(row, j) for row in rows])

    def is_whole(self, row: Sequence[Tensor | None], j: int) -> TypeGuard[Row]:
        """Whether these are all tensors of a bucket, of the kinds that this is for."""
        bucket = self._buckets[j]
        if not _PLAIN.issuperset(map(type, row)) or [*map(kind, row)] != bucket.kinds:
            return False
        # Pieces are cut from memory as it lies.
        return len(self._pieces[j]) == 1 or cast(Row, row)[0].stride() == bucket.stride

    def _add_bucket(self, j: int, rows: Sequence[Row], has_room: bool) -> None:
        if has_room:
            self.send(j, rows)
            return
        for row in rows[1:]:
            for total, tensor in zip(rows[0], row, strict=True):
                total.add_(tensor.to(total.device))

    def send(self, j: int, rows: Sequence[Row]) -> None:
        """Adds up a bucket, on what are the devices' current streams.

        Each device is prepared, and has one row or several; the first one's first gets the sum.
        """
        self._settle()
        self._is_at_work = True
        for piece in self._pieces[j]:
            stops: dict[torch.device, list[Row]] = {}
            for row in rows:
                stops.setdefault(row[0].device, []).append(piece.of(row))
            self._pass(piece, stops)
        self._is_at_work = False

    def _settle(self) -> None:
        """Waits for what may still be under way, if the latest sum was interrupted."""
        if self._is_at_work:
            for device in self._windows:
                if device.type != "cpu":
                    torch.accelerator.synchronize(device)
            self._is_at_work = False

    def _pass(self, passing: _Piece, stops: dict[torch.device, list[Row]]) -> None:
        """Sends a piece, of which each device has some rows, down the chain."""
        piece = passing.number
        *others, root = chain(list(stops))
        before: _Window | None = None
        own: Tensor | None = None  # leaves from where it is
        for device in others:
            here, rows = self._there(device), stops[device]
            views = here.pieces[piece].views
            if before is not None:
                before.send(piece, here, own)
                own = None
                _add(views, rows[0])
            elif len(rows) == 1 and passing.bucket.is_like(rows[0]):
                own = passing.bucket.flat(rows[0])
            else:
                here.claim(piece)
                copy_to_each(views, rows[0])
            for row in rows[1:]:
                _add(views, row)
            before = here
        total, *more = stops[root]
        for row in more:
            _add(total, row)
        if before is not None:
            here = self._there(root)
            before.send(piece, here, own)
            _add(total, here.pieces[piece].views)
            here.let_go(piece)

    def _there(self, device: torch.device) -> _Window:
        window = self._windows[device]
        if window is None:
            raise RuntimeError(f"Expected memory for sums on {device}, got none: prepare it first.")
        return window


class _Piece:
    """What passes at a time: a bucket."""

    def __init__(self, number: int, bucket: Bucket) -> None:
        self.number = number
        self.bucket = bucket

    def of(self, row: Row) -> Row:
        """This part of a replica's tensors."""
        return row


class _Slice(_Piece):
    """A part of a bucket that is one large tensor: these elements, as they lie in memory."""

    def __init__(self, number: int, bucket: Bucket, elements: range) -> None:
        super().__init__(number, bucket.of_elements(len(elements)))
        self._elements = elements

    def of(self, row: Row) -> Row:
        tensor, first = row[0], self._elements.start
        return [tensor.as_strided([len(self._elements)], [1], tensor.storage_offset() + first)]


class _Window:
    """Memory on a device through which pieces pass: each in its slot, which several share.

    Pieces come in the order of their numbers.
    """

    def __init__(self, device: torch.device, pieces: Sequence[_Piece]) -> None:
        self.device, self._is_cpu = device, device.type == "cpu"
        sizes = [piece.bucket.bytes for piece in pieces]
        self._slots = slots = slots_for(sizes)
        room = partial(torch.zeros, dtype=torch.uint8, device=device)
        memory = [room(max(sizes[slot::slots])) for slot in range(slots)]
        self.pieces = [p.bucket.in_memory(memory[p.number % slots]) for p in pieces]
        now = [] if self._is_cpu else [current_stream(device).record_event()]
        self._free = [now] * self._slots  # from these events on

    def claim(self, piece: int) -> None:
        """What the current stream is told from here on may write to a piece's slot."""
        for event in self._free[piece % self._slots]:
            self._current(piece).wait_event(event)

    def let_go(self, piece: int) -> None:
        """A piece's slot is free when the current stream is through."""
        if not self._is_cpu:
            self._free[piece % self._slots] = [self._current(piece).record_event()]

    def send(self, piece: int, target: _Window, own: Tensor | None = None) -> None:
        """Copies a piece to another device, whose current stream waits for it.

        It is in its slot; or it is `own`, which may be written again by what the current stream of
        this device is told from here on.
        """
        here, there = self.pieces[piece].flat, target.pieces[piece].flat
        if own is not None:
            here, there = own, there[: own.numel()]
        if self._is_cpu or target._is_cpu:
            target.claim(piece)
            there.copy_(here)
            self.let_go(piece)
            return
        way = lane(self.device, target.device)
        free = target._free[piece % self._slots]
        if own is None:
            way.carry(here, there, free)
            self._free[piece % self._slots] = [way.left()]
        else:
            leaving = Leaving(self.device)
            with leaving:
                leaving.another().begins(way)
                way.carry(here, there, free)
        way.arrive()
        target._current(piece)

    def _current(self, piece: int) -> torch.Stream:
        """The current stream, which uses a piece: nobody gets that memory until it is through."""
        stream = current_stream(self.device)
        self.pieces[piece].flat.record_stream(stream)
        return stream


def slots_for(sizes: Sequence[int]) -> int:
    """How many slots pieces of so many bytes share, in turns: one each, if a window holds all.

    Example:
        >>> slots_for([2**20] * 32), slots_for([2**20] * 33), slots_for([2**22] + [1] * 40)
        (32, 32, 41)
        >>> slots_for([2**30, 1]), slots_for([])
        (1, 0)
    """
    if sum(sizes) <= WINDOW_BYTES:
        return len(sizes)
    return max(1, WINDOW_BYTES // max(sizes))


def _add(sums: Row, terms: Row) -> None:
    try:
        add_to_each(sums, terms)
    except RuntimeError as error:
        add_as_read(sums, terms, error)
