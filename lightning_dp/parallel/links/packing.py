"""Packing: tensors of fixed kinds that often travel together, as views of a few flat ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TypeAlias, cast

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
from lightning_dp.parallel.links.leaving import Leaving
from lightning_dp.parallel.links.pipeline import Pipeline, copy_each
from lightning_dp.parallel.links.streams import are_accelerators
from lightning_dp.parallel.links.summing import Summing
from lightning_dp.parallel.torch_private import copy_to_each


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
        self._staged: dict[tuple[torch.device, bool], _Places | None] = {}
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

    def staged(self, device: torch.device, bucket: Bucket) -> Packed | None:
        """Where a bucket or a block is packed on a device; None if there was no room for it."""
        key = device, bucket in self._blocks
        if key not in self._staged:
            if key[1]:
                self._staged.pop((device, False), None)  # that for buckets, which were first
            try:
                self._staged[key] = places(device, self._blocks if key[1] else self.buckets)
            except torch.OutOfMemoryError:
                self._staged[key] = None
        found = self._staged[key]
        return None if found is None else found.get(bucket)

    def send(
        self,
        sources: Sequence[Tensor],
        targets: Sequence[Sequence[Packed]],
        *,
        joined: bool = False,
    ) -> None:
        """Copies tensors of these kinds, which are on one device, to memory for them.

        For each bucket there are `targets`: it is packed once, unless it is one tensor, which
        leaves from where it is. Between accelerators see `pipeline`.

        Args:
            sources: the tensors.
            targets: for each bucket, memory for it, perhaps on several devices.
            joined: whether blocks may be packed, where a copy takes long before its first byte.
        """
        if not any(targets):
            return
        self._pipeline.settle()
        device = sources[0].device
        leaving = Leaving(device)
        with leaving:
            for bucket, there in self._going(device, targets, joined):
                tensors = bucket.of(sources)
                if bucket.is_like(tensors):
                    flats = [packed.flat[: bucket.length] for packed in there]
                    self._pipeline.send(bucket.flat(tensors), flats, leaving)
                elif here := self.staged(device, bucket):
                    self._stage(here, tensors)
                    self._pipeline.send(here.flat, [packed.flat for packed in there])
                else:
                    for packed in there:
                        copy_each(packed.views, tensors)
            self._pipeline.arrive()

    def _going(
        self, root: torch.device, targets: Sequence[Sequence[Packed]], joined: bool
    ) -> Iterator[tuple[Bucket, Sequence[Packed]]]:
        """What goes out in a copy each, and where to: buckets, or blocks of them."""
        devices = {packed.flat.device for there in targets for packed in there}
        joined = joined and self._pipeline.wants_few_copies(root, devices)
        for block, held in self._blocks.items():
            there = [targets[j] for j in held]
            if joined and there[0] and are_whole(there) and self._has_place(root, block):
                yield block, [cast(Packed, own.block) for own in there[0]]
            else:
                yield from ((self.buckets[j], targets[j]) for j in held if targets[j])

    def _has_place(self, device: torch.device, block: Bucket) -> bool:
        return len(block.order) == 1 or self.staged(device, block) is not None

    def _stage(self, here: Packed, tensors: Sequence[Tensor]) -> None:
        """Packs a bucket where it is to leave from, when what was there before has left."""
        self._pipeline.claim(here.flat)
        copy_to_each(here.views, tensors)

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
        here, there = (self.staged(d, self.buckets[j]) for d in (parts[0].device, device))
        if here is None or there is None:
            return [part.to(device) for part in parts]
        self._stage(here, parts)
        self._pipeline.claim(there.flat)
        there.flat.copy_(here.flat, non_blocking=are_accelerators(here.flat.device, device))
        return there.views


_Places: TypeAlias = dict["Bucket", Packed]


def places(device: torch.device, passing: Iterable[Bucket]) -> _Places:
    """Memory for buckets of several tensors: two places, one packed while one leaves."""
    shared = [own for own in passing if len(own.order) > 1]
    size = max([own.bytes for own in shared], default=0)
    room = partial(torch.zeros, size, dtype=torch.uint8, device=device)
    memory = [room() for _ in shared[:2]]
    return {own: own.in_memory(memory[j % 2]) for j, own in enumerate(shared)}
