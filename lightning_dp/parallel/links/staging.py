"""Staging: where tensors are packed on their device before they leave it.

Two places stay for good, one packed while one leaves; who packs the next bucket waits until what
was there has left. The last buckets of all are packed in memory that each send takes anew, so that
the device may go on while they leave: parameters go out before a forward, when there is room that
activations and gradients will need later.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from lightning_dp.parallel.links.buckets import Bucket, Packed
from lightning_dp.parallel.links.leaving import Departure
from lightning_dp.parallel.links.streams import current_stream
from lightning_dp.parallel.torch_private import copy_to_each

MOST_BYTES = 64 * 2**20
"""That a send takes anew."""

LEAST_BYTES = 2**15
"""For each tensor of a bucket: of smaller ones, new views take longer to make than all to leave."""

Places: TypeAlias = dict[Bucket, Packed]


class Staging:
    """The places of some buckets, and of the blocks that hold them."""

    def __init__(self, buckets: Sequence[Bucket], blocks: Iterable[Bucket]) -> None:
        self._buckets, self._blocks = buckets, list(blocks)
        self._places: dict[tuple[torch.device, bool], Places | None] = {}
        self._may_take = True
        self._departures: dict[int, Departure] = {}  # by address, of what was packed there last

    def place(self, device: torch.device, bucket: Bucket) -> Packed | None:
        """Where a bucket or a block is packed on a device; None if there was no room for it."""
        key = device, bucket in self._blocks
        if key not in self._places:
            if key[1]:
                self._places.pop((device, False), None)  # that for buckets, which were first
            try:
                self._places[key] = places(device, self._blocks if key[1] else self._buckets)
            except torch.OutOfMemoryError:
                self._places[key] = None
        found = self._places[key]
        return None if found is None else found.get(bucket)

    def pack(self, here: Packed, tensors: Sequence[Tensor]) -> Departure:
        """Packs a bucket in its place, when what was there before has left."""
        departure = self.claim(here)
        copy_to_each(here.views, tensors)
        return departure

    def claim(self, here: Packed) -> Departure:
        """From here on, the current stream may write to a place."""
        if here.flat.device.type == "cpu":
            return Departure()  # what leaves the host has left when it is copied
        address = here.flat.data_ptr()
        before = self._departures.get(address)
        if before is not None:
            before.release(current_stream(here.flat.device))
        # Now, and not before: an interrupt may come in between.
        self._departures[address] = departure = Departure()
        return departure

    def pack_apart(self, bucket: Bucket, tensors: Sequence[Tensor]) -> Packed | None:
        """Packs a bucket in memory that is taken for it; None once there was no room for one.

        None as well if its tensors are small.
        """
        take = partial(torch.empty, bucket.bytes, dtype=torch.uint8, device=tensors[0].device)
        if not self._may_take or bucket.bytes < LEAST_BYTES * len(bucket.order):
            return None
        try:
            here = bucket.in_memory(take())
        except torch.OutOfMemoryError:
            self._may_take = False
            return None
        copy_to_each(here.views, tensors)
        return here


def first_apart(sizes: Sequence[int], most: int) -> int:
    """Of things that leave in this order, the first that is packed apart: the last ones that fit.

    Args:
        sizes: of each, the bytes.
        most: bytes in all.

    Example:
        >>> first_apart([5, 1, 4, 2], 7), first_apart([5, 1, 8], 7), first_apart([1, 2], 7)
        (1, 3, 0)
    """
    first, left = len(sizes), most
    while first and sizes[first - 1] <= left:
        first -= 1
        left -= sizes[first]
    return first


def places(device: torch.device, passing: Iterable[Bucket]) -> Places:
    """Memory for buckets of several tensors: two places, one packed while one leaves."""
    shared = [own for own in passing if len(own.order) > 1]
    size = max([own.bytes for own in shared], default=0)
    room = partial(torch.zeros, size, dtype=torch.uint8, device=device)
    memory = [room() for _ in shared[:2]]
    return {own: own.in_memory(memory[j % 2]) for j, own in enumerate(shared)}
