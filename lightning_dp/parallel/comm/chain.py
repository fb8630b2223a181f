"""The chain of devices: parameters go down it from the root, sums of gradients come up to the root.

[Note: the chain] From the root to each device by itself, parameters would leave the root K - 1
times over one link. Down a chain every device receives and sends once, all of them at the same
time, piece by piece. Gradients take the same way back: a device adds its own to what arrives and
sends the sum on. So the order of addition depends on the list of devices alone.

[Note: events] Copies and sums run on the copy streams. These first wait for the devices' current
streams, and at the end the current streams wait for them: then all memory that was read may be
written or freed again. In between, a piece waits only for its own arrival and for its buffer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from lightning_dp.parallel.comm.buckets import (
    Bucket,
    Packed,
    can_be_packed,
    group,
    kind,
    to_device_coalesced,
)
from lightning_dp.parallel.comm.streams import (
    copy_stream,
    current_stream,
    on_streams,
    wait_for_copies,
)
from lightning_dp.parallel.torch_private import add_to_each, copy_to_each

POOL_BYTES = 32 * 2**20
"""Buffers on each device: as many buckets as fit are on their way at once."""

PIECE_BYTES = 2**20
"""With three devices or more, parameters are passed on in pieces of this size."""

SLICE_BYTES = 4 * 2**20
"""Of a tensor larger than a bucket, gradients are passed on in slices of this size."""

_refused_pools: Counter[torch.device] = Counter()


def refused_pools(device: torch.device) -> int:
    """How often a device had no memory for a pool: its count of failed allocations has these, too.

    Sums then take another way, and no step has failed.
    """
    return _refused_pools[device]


class Packing:
    """Tensors of fixed kinds in buckets: their memory on other devices, and their ways there.

    Args:
        tensors: the root's, in the order in which a forward needs them.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._kinds = list(map(kind, tensors))
        self.buckets = [
            Bucket(order, [tensors[i] for i in order])
            for order in sorted(group(tensors))
            if can_be_packed(tensors[order[0]])
        ]
        self._packed = [i for bucket in self.buckets for i in bucket.order]
        self.alone = sorted({*range(len(tensors))}.difference(self._packed))  # cannot be packed
        self.sums = ChainSum(self.buckets)

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are tensors of the kinds that this is for."""
        return list(map(kind, tensors)) == self._kinds

    def memory(
        self, tensors: Sequence[Tensor], device: torch.device
    ) -> tuple[list[Packed], list[Tensor]]:
        """New memory for these tensors on a device: by buckets, and tensor by tensor."""
        packed = [bucket.on(device) for bucket in self.buckets]
        own = {i: tensors[i].detach().to(device, copy=True) for i in self.alone}
        for bucket, there in zip(self.buckets, packed, strict=True):
            own.update(zip(bucket.order, there.views, strict=True))
        return packed, [own[i] for i in range(len(tensors))]

    def send(self, sources: Sequence[Tensor], targets: Sequence[Sequence[Packed]]) -> None:
        """Copies the root's tensors to other devices; see the notes on the chain and on events.

        Args:
            sources: all tensors.
            targets: for each bucket its memory on the devices that are to get it.
        """
        going = [*zip(self.buckets, targets, strict=True)]
        devices = dict.fromkeys(own.flat.device for _, there in going for own in there)
        if not devices:
            return
        root = sources[0].device
        if not _are_accelerators([root, *devices]):
            for bucket, there in going:
                _copy_together(bucket.of(sources), [own.views for own in there])
            return
        devices = dict.fromkeys([root, *devices])
        pool = self.sums.pools[root] if self.sums.prepare([root]) else None
        arriving = [copy_stream(device, "arriving") for device in devices]
        for stream in arriving:
            stream.wait_stream(current_stream(stream.device))
        try:
            with on_streams(arriving):
                for j, (bucket, there) in enumerate(going):
                    if there:
                        self._send(j, bucket.of(sources), there, pool)
        finally:
            wait_for_copies(devices)

    def _send(
        self, j: int, tensors: list[Tensor], there: Sequence[Packed], pool: Pool | None
    ) -> None:
        flat = self.buckets[j].flat_memory(tensors)
        piece = None
        if flat is None and pool is not None and len(tensors) > 1:
            [piece] = self.sums.pieces[j]
            flat, views = pool.take(piece)
            copy_to_each(views, tensors)
        if flat is None:  # one by one: no memory to pack them, or a tensor of unusual strides
            for packed in there:
                for view, tensor in zip(packed.views, tensors, strict=True):
                    view.copy_(tensor, non_blocking=True)
            return
        stops: dict[torch.device, Tensor] = {flat.device: flat}
        again: list[tuple[Tensor, Tensor]] = []  # for further replicas of a device
        for packed in there:
            target = packed.flat[: flat.numel()]
            first = stops.setdefault(target.device, target)
            if first is not target:
                again.append((first, target))
        size = flat.numel() if len(stops) == 2 else PIECE_BYTES // flat.element_size()
        for parts in zip(*[own.split(max(1, size)) for own in stops.values()], strict=True):
            for source, target in pairwise(parts):
                _pass_on(source, target)
        if pool is not None and piece is not None:
            pool.free(piece)
        for first, target in again:
            target.copy_(first)

    def copy(self, sources: Sequence[Tensor], copies: Iterable[Sequence[Tensor]]) -> None:
        """Copies the root's tensors to tensors with memory of their own, in few copies per device.

        Tensors that cannot be packed are left out.
        """
        targets = [[copy[i] for i in self._packed] for copy in copies]
        _copy_together([sources[i] for i in self._packed], targets)


def _copy_together(sources: Sequence[Tensor], copies: Sequence[Sequence[Tensor]]) -> None:
    """Copies tensors to each of several lists, with one transfer per device."""
    arrived: dict[torch.device, list[Tensor]] = {}
    for targets in copies if sources else ():
        device = targets[0].device
        if device not in arrived:
            arrived[device] = to_device_coalesced(sources, device)
        copy_to_each(targets, arrived[device])


def _pass_on(source: Tensor, target: Tensor) -> None:
    """Copies from one device to the next, once the source has arrived there."""
    leaving = copy_stream(source.device, "leaving")
    leaving.wait_stream(current_stream(source.device))
    with on_streams([leaving]):
        target.copy_(source, non_blocking=True)  # the target's current stream waits for it


class Piece(NamedTuple):
    """What passes at a time: a bucket, or a slice of its only tensor from an element on."""

    number: int
    bucket: Bucket
    start: int | None

    def of(self, row: Sequence[Tensor]) -> Sequence[Tensor]:
        """This piece of a bucket's row of tensors."""
        if self.start is None:
            return row
        first = row[0].storage_offset() + self.start
        return [row[0].as_strided([self.bucket.length], [1], first)]


def _are_accelerators(devices: Iterable[torch.device]) -> bool:
    """Whether copies between these devices need not block the host."""
    return all(device.type != "cpu" for device in devices)


def _cut(bucket: Bucket, number: int) -> list[Piece]:
    """A bucket as one piece; if it is a tensor larger than a slice, its slices."""
    step = SLICE_BYTES // bucket.dtype.itemsize
    if len(bucket.order) > 1 or bucket.length <= step:
        return [Piece(number, bucket, None)]
    pieces: list[Piece] = []
    for start in range(0, bucket.length, step):
        part = torch.empty(min(step, bucket.length - start), dtype=bucket.dtype, device="meta")
        pieces.append(Piece(number + len(pieces), Bucket([0], [part]), start))
    return pieces


class Pool:
    """The buffers of one device, which pieces take in turns by their numbers."""

    def __init__(self, device: torch.device, pieces: Sequence[Piece]) -> None:
        self._device = device
        sizes = [piece.bucket.bytes for piece in pieces]
        self._count = len(sizes) if sum(sizes) <= POOL_BYTES else max(1, POOL_BYTES // max(sizes))
        most = [max(sizes[turn :: self._count]) for turn in range(self._count)]
        memory = [torch.zeros(size, dtype=torch.uint8, device=device) for size in most]
        self.packed = [p.bucket.in_memory(memory[p.number % self._count]) for p in pieces]
        self._free = [[current_stream(device).record_event()]] * self._count

    def take(self, piece: Piece) -> Packed:
        """A buffer for a piece; the current stream waits until it is free."""
        for event in self._free[piece.number % self._count]:
            current_stream(self._device).wait_event(event)
        return self.packed[piece.number]

    def free(self, piece: Piece) -> None:
        """Another piece may take the buffer when the copy streams come here."""
        streams = [copy_stream(self._device, end) for end in ("arriving", "leaving")]
        self._free[piece.number % self._count] = [stream.record_event() for stream in streams]


class ChainSum:
    """Adds up rows of tensors of several accelerators, bucket by bucket, on their way to the root.

    `send` starts a bucket; after all of them `wait_for_copies` makes the sums safe to read.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = buckets
        self.pieces: list[list[Piece]] = []
        self.pools: dict[torch.device, Pool] = {}
        self._without_room: set[torch.device] = set()
        number = 0
        for bucket in buckets:
            self.pieces.append(_cut(bucket, number))
            number += len(self.pieces[-1])

    def prepare(self, devices: Sequence[torch.device]) -> bool:
        """Takes buffers on these devices; False if one has no memory for them, or is the CPU."""
        if not _are_accelerators(devices):
            return False
        pieces = [piece for own in self.pieces for piece in own]
        for device in {*devices} - self.pools.keys() - self._without_room:
            try:
                self.pools[device] = Pool(device, pieces)
            except torch.OutOfMemoryError:
                self._without_room.add(device)
                _refused_pools[device] += 1
        return self._without_room.isdisjoint(devices)

    def give_up(self) -> None:
        """Frees the buffers for good, since memory is short."""
        wait_for_copies(self.pools)
        self._without_room.update(self.pools)
        self.pools.clear()

    def is_whole(self, row: Sequence[Tensor | None], j: int) -> TypeGuard[list[Tensor]]:
        """Whether a row is all of bucket j, as it can be sent."""
        bucket, is_cut = self._buckets[j], len(self.pieces[j]) > 1
        return bucket.fits(row) and not (is_cut and bucket.flat_memory(row) is None)

    def send(
        self, j: int, rows: Sequence[Sequence[Tensor]], ready: Iterable[torch.Event] | None = None
    ) -> None:
        """Starts the sum of the replicas' rows of bucket j, in place of the first row, the root's.

        The devices are prepared, and the rows `is_whole`. They are written when the `ready` events
        have come; without these, when the current streams come here.
        """
        stops: dict[torch.device, list[Sequence[Tensor]]] = {}
        for row in rows:
            stops.setdefault(row[0].device, []).append(row)
        arriving = {device: copy_stream(device, "arriving") for device in stops}
        for device, stream in arriving.items() if ready is None else ():
            stream.wait_stream(current_stream(device))
        for event in ready or ():
            arriving[event.device].wait_event(event)
        with on_streams([*arriving.values()]):
            for piece in self.pieces[j]:
                self._pass(piece, stops)

    def _pass(self, piece: Piece, stops: dict[torch.device, list[Sequence[Tensor]]]) -> None:
        """Sends a piece up the chain, from the last device to the root."""
        root, *others = stops
        total, *more = [piece.of(row) for row in stops[root]]
        for row in more:
            add_each(total, row)
        flat: Tensor | None = None  # the sum so far, on the device before
        before: Pool | None = None  # in its buffer; None if it leaves from a gradient's own memory
        for device in reversed(others):
            rows = [piece.of(row) for row in stops[device]]
            own = piece.bucket.flat_memory(rows[0]) if flat is None and len(rows) == 1 else None
            if own is not None:
                flat = own
                continue
            here = self.pools[device].take(piece)
            if flat is None:
                copy_to_each(here.views, rows.pop(0))
            else:
                self._arrive(piece, flat, here, before)
            for row in rows:
                add_each(here.views, row)
            flat, before = here.flat, self.pools[device]
        if flat is not None:
            here = self.pools[root].take(piece)
            self._arrive(piece, flat, here, before)
            add_each(total, here.views)
            self.pools[root].free(piece)

    def _arrive(self, piece: Piece, flat: Tensor, here: Packed, before: Pool | None) -> None:
        _pass_on(flat, here.flat[: flat.numel()])
        if before is not None:
            before.free(piece)


def add_each(sums: Sequence[Tensor], terms: Sequence[Tensor]) -> None:
    """Adds a term to each tensor, in place, in few kernels.

    The foreach kernel refuses, before it adds anything, tensors with a lazy conjugation or
    negation: these are added one by one.
    """
    try:
        add_to_each(sums, terms)
    except RuntimeError:
        if not any([own.is_conj() or own.is_neg() for own in (*sums, *terms)]):
            raise
        for own, term in zip(sums, terms, strict=True):
            own.add_(term)
