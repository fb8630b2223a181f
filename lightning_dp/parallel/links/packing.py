"""Packing: tensors of fixed kinds that often travel together, as views of a few flat ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from lightning_dp.parallel.links.buckets import (
    Bucket,
    Packed,
    are_whole,
    blocks,
    can_be_packed,
    group,
    kind,
    most_bytes,
)
from lightning_dp.parallel.links.leaving import Departure, Leaving
from lightning_dp.parallel.links.pipeline import Arrived, Pipeline, copy_each
from lightning_dp.parallel.links.staging import MOST_BYTES, Staging, first_apart
from lightning_dp.parallel.links.streams import are_accelerators
from lightning_dp.parallel.links.summing import Summing
from lightning_dp.parallel.torch_private import copy_to_each


class Arrival(NamedTuple):
    """When the tensors of these positions are there."""

    positions: Sequence[int]
    event: torch.Event


class Packing:
    """Which tensors lie in which bucket, and where: those of one dtype, at most a bucket's bytes.

    Tensors keep their strides (channels_last stays channels_last) where these are dense. Those that
    will change together are best of one `requires_grad`: they share a bucket.

    Packing takes memory. Where a device has none left for it, tensors travel one by one.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._kinds = list(map(kind, tensors))
        self.buckets = [
            Bucket(positions, [tensors[i] for i in positions])
            for positions in sorted(group(tensors))  # as a forward needs them
            if can_be_packed(tensors[positions[0]])
        ]
        self._blocks = {self._block(held, tensors): held for held in blocks(self.buckets)}
        packed = set().union(*(bucket.positions for bucket in self.buckets))
        self.alone = [i for i in range(len(tensors)) if i not in packed]  # cannot be packed
        self._staging = Staging(self.buckets, self._blocks)
        self._pipeline = Pipeline()
        self.sums = Summing(self.buckets, most_bytes())  # of several devices' tensors

    def _block(self, held: range, tensors: Sequence[Tensor]) -> Bucket:
        positions = [i for j in held for i in self.buckets[j].order]
        return Bucket(positions, [tensors[i] for i in positions])

    def fits(self, tensors: Sequence[Tensor | None]) -> bool:
        """Whether these are of the kinds that this is for, every one of them."""
        try:
            return list(map(kind, tensors)) == self._kinds
        except AttributeError:  # one is None
            return False

    def memory(
        self, tensors: Sequence[Tensor], device: torch.device
    ) -> tuple[list[Packed], list[Tensor]]:
        """Memory for tensors of these kinds on a device: bucket by bucket, and one by one."""
        packed: list[Packed] = []
        for block, held in self._blocks.items():
            packed += block.on(device).split([self.buckets[j] for j in held])
        own = {i: tensors[i].detach().to(device, copy=True) for i in self.alone}
        for bucket, there in zip(self.buckets, packed, strict=True):
            own.update(zip(bucket.order, there.views, strict=True))
        return packed, [own[i] for i in range(len(tensors))]

    def send(
        self,
        sources: Sequence[Tensor],
        targets: Sequence[Sequence[Packed]],
        *,
        joined: bool = False,
        late: bool = False,
    ) -> dict[torch.device, list[Arrival]]:
        """Copies tensors of these kinds, which are on one device, to memory for them.

        For each bucket there are `targets`: it is packed once, unless it is one tensor, which
        leaves from where it is. Between accelerators see `pipeline`.

        Args:
            sources: the tensors.
            targets: for each bucket, memory for it, perhaps on several devices.
            joined: whether blocks may be packed, where a copy takes long before its first byte.
            late: whether current streams need not wait for what arrives; `arrive` does it later.

        Returns:
            What has not been waited for, device by device.
        """
        if not any(targets):
            return {}
        self._pipeline.settle()
        device = sources[0].device
        leaving, arrivals = Leaving(device), defaultdict[torch.device, list[Arrival]](list)
        with leaving:
            for bucket, there, is_apart in self._going(device, targets, joined):
                tensors = bucket.of(sources)
                arrived = self._send(bucket, tensors, there, leaving, is_apart=is_apart)
                for there_device, event in arrived.items():
                    arrivals[there_device].append(Arrival(bucket.order, event))
            left = self._pipeline.arrive(set(arrivals) if late else ())
        return {own: arrivals[own] for own in left}

    def arrive(self) -> None:
        """The current streams go on when all is there that was sent."""
        self._pipeline.arrive()

    def _send(
        self,
        bucket: Bucket,
        tensors: Sequence[Tensor],
        there: Sequence[Packed],
        leaving: Leaving,
        *,
        is_apart: bool,
    ) -> Arrived:
        flats = [packed.flat for packed in there]
        if is_apart and (here := self._staging.pack_apart(bucket, tensors)):
            return self._pipeline.send(here.flat, flats, Departure())
        if bucket.is_like(tensors):
            flats = [flat[: bucket.length] for flat in flats]
            return self._pipeline.send(bucket.flat(tensors), flats, leaving.another())
        if here := self._staging.place(tensors[0].device, bucket):
            departure = self._staging.pack(here, tensors)
            return self._pipeline.send(here.flat, flats, departure)
        for packed in there:
            copy_each(packed.views, tensors)
        return {}

    def _going(
        self, root: torch.device, targets: Sequence[Sequence[Packed]], joined: bool
    ) -> Iterator[tuple[Bucket, Sequence[Packed], bool]]:
        """What goes out in a copy each, where to, and whether it is packed apart.

        These are buckets, or blocks of them.
        """
        devices = {packed.flat.device for there in targets for packed in there}
        joined = joined and self._pipeline.wants_few_copies(root, devices)
        held_bytes = [
            sum(self.buckets[j].bytes for j in held if targets[j]) for held in self._blocks.values()
        ]
        apart = first_apart(held_bytes, 0 if root.type == "cpu" else MOST_BYTES)
        for i, (block, held) in enumerate(self._blocks.items()):
            there, is_apart = [targets[j] for j in held], i >= apart
            is_whole = joined and there[0] and are_whole(there)
            if is_whole and (is_apart or self._has_place(root, block)):
                yield block, [cast(Packed, own.block) for own in there[0]], is_apart
            else:
                yield from ((self.buckets[j], targets[j], is_apart) for j in held if targets[j])

    def _has_place(self, device: torch.device, block: Bucket) -> bool:
        return len(block.order) == 1 or self._staging.place(device, block) is not None

    def copy(self, sources: Sequence[Tensor], copies: Sequence[Sequence[Tensor]]) -> None:
        """Copies tensors of these kinds, which are on one device, to tensors with their own memory.

        There is one sequence of `copies` for each target. They share one copy of a bucket to their
        device; what cannot be packed is left out.
        """
        here = sources[0].device if sources else None
        away: dict[torch.device, list[Sequence[Tensor]]] = {}
        for copy in copies if sources else ():
            away.setdefault(copy[0].device, []).append(copy)
        for j, bucket in enumerate(self.buckets):
            for device, targets in away.items():
                parts: Sequence[Tensor] = bucket.of(sources)
                if device != here and len(parts) > 1:
                    parts = self._sent(j, parts, device)
                for target in targets:
                    copy_to_each(bucket.of(target), parts)

    def _sent(self, j: int, parts: Sequence[Tensor], device: torch.device) -> Sequence[Tensor]:
        """The tensors of a bucket on another device, where they pass through."""
        place = self._staging.place
        here, there = (place(d, self.buckets[j]) for d in (parts[0].device, device))
        if here is None or there is None:
            return [part.to(device) for part in parts]
        self._staging.pack(here, parts)
        self._staging.claim(there)
        there.flat.copy_(here.flat, non_blocking=are_accelerators(here.flat.device, device))
        return there.views
