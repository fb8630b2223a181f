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

from collections.abc import Iterable, Sequence
from itertools import chain, pairwise
from typing import TypeGuard

import torch
from torch import Tensor

from lightning_dp.parallel.comm.buckets import (
    Bucket,
    Packed,
    can_be_packed,
    elements_per_piece,
    group,
    kind,
)
from lightning_dp.parallel.comm.streams import (
    copy_stream,
    current_stream,
    on_streams,
    wait_for_copies,
)
from lightning_dp.parallel.torch_private import add_to_each, copy_to_each

POOL_BYTES = 32 * 2**20
"""Buffers on each device: as many pieces as fit are on their way at once."""


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
        packed = chain.from_iterable(bucket.order for bucket in self.buckets)
        self.alone = sorted({*range(len(tensors))}.difference(packed))  # cannot be packed
        self.sums = ChainSum(self.buckets)

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are tensors of the kinds that this is for."""
        return list(map(kind, tensors)) == self._kinds

    def memory(
        self, tensors: Sequence[Tensor], device: torch.device
    ) -> tuple[list[Packed], list[Tensor]]:
        """New memory for these tensors on a device: by buckets, and tensor by tensor."""
        packed = [bucket.on(device) for bucket in self.buckets]
        copies = {i: tensors[i].detach().to(device, copy=True) for i in self.alone}
        for bucket, memory in zip(self.buckets, packed, strict=True):
            copies.update(zip(bucket.order, memory.views, strict=True))
        return packed, [copies[i] for i in range(len(tensors))]

    def send(self, sources: Sequence[Tensor], targets: Sequence[Sequence[Packed]]) -> None:
        """Copies the root's tensors to other devices; see the notes on the chain and on events.

        Args:
            sources: all tensors.
            targets: for each bucket its memory on the devices that are to get it.
        """
        others = dict.fromkeys(packed.flat.device for packed in chain.from_iterable(targets))
        if not others:
            return
        root, devices = sources[0].device, [sources[0].device, *others]
        if not _are_accelerators(devices):
            for bucket, copies in zip(self.buckets, targets, strict=True):
                for packed in copies:
                    copy_to_each(packed.views, bucket.of(sources))
            return
        pool = self.sums.pools[root] if self.sums.prepare([root]) else None
        arriving = [copy_stream(device, "arriving") for device in devices]
        for stream in arriving:
            stream.wait_stream(current_stream(stream.device))
        try:
            with on_streams(arriving):
                for j, copies in enumerate(targets):
                    if copies:
                        self._send(j, self.buckets[j].of(sources), copies, pool)
        finally:
            wait_for_copies(devices)

    def _send(
        self, j: int, tensors: list[Tensor], copies: Sequence[Packed], pool: Pool | None
    ) -> None:
        bucket, flat = self.buckets[j], self.buckets[j].flat_memory(tensors)
        is_packed = pool is not None and len(tensors) > 1
        if pool is not None and is_packed:
            flat, views = pool.take(bucket)
            copy_to_each(views, tensors)
        if flat is None:  # one by one: no memory to pack them, or a tensor of unusual strides
            for packed in copies:
                for view, tensor in zip(packed.views, tensors, strict=True):
                    view.copy_(tensor, non_blocking=True)
            return
        size, step = flat.numel(), elements_per_piece(flat.dtype)
        stops = [f[:size].split(step) for f in (flat, *[packed.flat for packed in copies])]
        for parts in zip(*stops, strict=True):
            for source, target in pairwise(parts):
                _pass_on(source, target)
        if pool is not None and is_packed:
            pool.free(bucket)


def _pass_on(source: Tensor, target: Tensor) -> None:
    """Copies from one device to the next, once the source has arrived there."""
    if source.device == target.device:
        target.copy_(source)
        return
    leaving = copy_stream(source.device, "leaving")
    leaving.wait_stream(current_stream(source.device))
    with on_streams([leaving]):
        target.copy_(source, non_blocking=True)  # the target's current stream waits for it


def _are_accelerators(devices: Iterable[torch.device]) -> bool:
    """Whether copies between these devices need not block the calling thread."""
    return all(device.type != "cpu" for device in devices)


class Pool:
    """The buffers of one device, which pieces take in turns."""

    def __init__(self, device: torch.device, pieces: Sequence[Bucket]) -> None:
        self._device = device
        most = max(piece.bytes for piece in pieces)
        count = min(len(pieces), max(1, POOL_BYTES // max(1, most)))
        memory = [torch.zeros(most, dtype=torch.uint8, device=device) for _ in range(count)]
        self._places = {piece: i % count for i, piece in enumerate(pieces)}
        self._packed = {piece: piece.in_memory(memory[i]) for piece, i in self._places.items()}
        self._free = [[current_stream(device).record_event()]] * count

    def take(self, piece: Bucket) -> Packed:
        """A buffer for a piece; the current stream waits until it is free."""
        for event in self._free[self._places[piece]]:
            current_stream(self._device).wait_event(event)
        return self._packed[piece]

    def free(self, piece: Bucket) -> None:
        """Another piece may take the buffer when the copy streams come here."""
        streams = [copy_stream(self._device, end) for end in ("arriving", "leaving")]
        self._free[self._places[piece]] = [stream.record_event() for stream in streams]


class ChainSum:
    """Adds up rows of tensors of several accelerators, bucket by bucket, on their way to the root.

    `send` starts a bucket; after all of them `wait_for_copies` makes the sums safe to read.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = buckets
        self._pieces = [bucket.pieces() for bucket in buckets]
        self.pools: dict[torch.device, Pool] = {}
        self._without_room: set[torch.device] = set()

    def prepare(self, devices: Sequence[torch.device]) -> bool:
        """Takes buffers on these devices; False if one has no memory for them, or is the CPU."""
        if not (self._buckets and _are_accelerators(devices)):
            return False
        for device in {*devices} - self.pools.keys() - self._without_room:
            try:
                self.pools[device] = Pool(device, [*chain.from_iterable(self._pieces)])
            except torch.OutOfMemoryError:
                self._without_room.add(device)
        return self._without_room.isdisjoint(devices)

    def give_up(self) -> bool:
        """Frees the buffers for good, since memory is short; whether there were any."""
        had_buffers = bool(self.pools)
        wait_for_copies(self.pools)
        self._without_room.update(self.pools)
        self.pools.clear()
        return had_buffers

    def is_whole(self, row: Sequence[Tensor | None], j: int) -> TypeGuard[list[Tensor]]:
        """Whether a row is all of bucket j, as it can be sent."""
        bucket, is_cut = self._buckets[j], len(self._pieces[j]) > 1
        return bucket.fits(row) and not (is_cut and bucket.flat_memory(row) is None)

    def send(
        self, j: int, rows: Sequence[Sequence[Tensor]], ready: Iterable[torch.Event] | None = None
    ) -> None:
        """Starts the sum of the replicas' rows of bucket j, in place of the first row, the root's.

        Call it after `prepare(devices)` and `is_whole(row, j)` returned True. The rows are complete
        at the `ready` events; without these, once the work now on the current streams is done.
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
            for piece in self._pieces[j]:
                self._pass(piece, stops)

    def _pass(self, piece: Bucket, stops: dict[torch.device, list[Sequence[Tensor]]]) -> None:
        """Sends a piece up the chain, from the last device to the root."""
        root, *others = stops
        total, *terms = [piece.part(row) for row in stops[root]]
        for row in terms:
            add_each(total, row)
        sent: Packed | None = None  # the sum so far, in a buffer of the device before
        for before, device in pairwise([root, *reversed(others), root] if others else ()):
            here = self.pools[device].take(piece)
            rows = [] if device is root else [piece.part(row) for row in stops[device]]
            if sent is None:
                copy_to_each(here.views, rows.pop(0))
            else:
                _pass_on(sent.flat, here.flat)
                self.pools[before].free(piece)
            for row in rows:
                add_each(here.views, row)
            sent = here
        if sent is not None:
            add_each(total, sent.views)
            self.pools[root].free(piece)


def add_each(sums: Sequence[Tensor], terms: Sequence[Tensor]) -> None:
    """Adds a term to each tensor, in place, in few kernels."""
    if any([t.is_conj() or t.is_neg() for t in (*sums, *terms)]):  # foreach refuses these
        for total, term in zip(sums, terms, strict=True):
            total.add_(term)
    else:
        add_to_each(sums, terms)
