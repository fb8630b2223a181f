"""The chain of devices: parameters go down it from the root, sums of gradients come up to the root.

[Note: the chain] From the root to each device by itself, parameters would leave the root K - 1
times over one link. Down a chain every device receives and sends once, all of them at the same
time, piece by piece. Gradients take the same way back: a device adds its own to what arrives and
sends the sum on. So the order of addition depends on the list of devices alone.

[Note: events] Copies and sums run on the copy streams. These first wait for the devices' current
streams, and at the end the current streams wait for them: then all memory that was read may be
written or freed again. In between, a piece waits only for its own arrival. Memory of the chain's
own is allocated on the arriving stream; `record_stream` of the leaving one keeps it from reuse.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, pairwise

import torch
from torch import Tensor

from lightning_dp.parallel.comm import buckets
from lightning_dp.parallel.comm.buckets import (
    Bucket,
    Packed,
    can_be_packed,
    group,
    in_pieces,
    kind,
)
from lightning_dp.parallel.comm.streams import (
    copy_stream,
    current_stream,
    on_streams,
    wait_for_copies,
)
from lightning_dp.parallel.torch_private import add_to_each, copy_to_each


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
        ways = [
            (bucket, bucket.of(sources), copies)
            for bucket, copies in zip(self.buckets, targets, strict=True)
            if copies
        ]
        others = dict.fromkeys(copy.flat.device for _, _, copies in ways for copy in copies)
        devices = [sources[0].device, *others] if ways else []
        if not are_accelerators(devices):
            for _, tensors, copies in ways:
                for packed in copies:
                    copy_to_each(packed.views, tensors)
            return
        arriving = [copy_stream(device, "arriving") for device in devices]
        for stream in arriving:
            stream.wait_stream(current_stream(stream.device))
        try:
            with on_streams(arriving):
                for bucket, tensors, copies in ways:
                    _send(bucket, tensors, copies)
        finally:
            wait_for_copies(devices)

    def add_up(
        self, j: int, rows: Sequence[Sequence[Tensor]], ready: Iterable[torch.Event]
    ) -> None:
        """Starts the sum of the replicas' rows of bucket j, in place of the first row, the root's.

        The devices are accelerators, and each row `is_whole`. The rows are complete at the `ready`
        events, and may be written to; `wait_for_copies` makes the sum safe to read.
        """
        stops: dict[torch.device, list[Sequence[Tensor]]] = {}
        for row in rows:
            stops.setdefault(row[0].device, []).append(row)
        arriving = {device: copy_stream(device, "arriving") for device in stops}
        for event in ready:
            arriving[event.device].wait_event(event)
        with on_streams([*arriving.values()]):
            _add_up(self.buckets[j], [*stops.values()])


def are_accelerators(devices: Iterable[torch.device]) -> bool:
    """Whether copies between these devices need not block the calling thread."""
    return all(device.type != "cpu" for device in devices)


def _send(bucket: Bucket, tensors: Sequence[Tensor], copies: Sequence[Packed]) -> None:
    """Sends a bucket down the chain of its copies, piece by piece."""
    packed = bucket.pack(tensors)
    for pieces in in_pieces([packed.flat, *[copy.flat for copy in copies]], buckets.PIECE_BYTES):
        for source, target in pairwise(pieces):
            _pass_on(source, target)
    _give_back(packed)


def _add_up(bucket: Bucket, stops: Sequence[Sequence[Sequence[Tensor]]]) -> None:
    """Adds up the rows of each device; sends the sums up the chain, from the last device on."""
    for total, *terms in stops:
        for row in terms:
            add_to_each(total, row)
    sums = [bucket.pack(rows[0]) for rows in reversed(stops)]
    size = buckets.BUCKET_BYTES if sums[-1].views else buckets.PIECE_BYTES  # of a large tensor
    for pieces in in_pieces([packed.flat for packed in sums], size):
        for source, target in pairwise(pieces):
            arrived = torch.empty_like(target)
            _pass_on(source, arrived)
            target.add_(arrived)
    for packed in sums:
        _give_back(packed)
    if sums[-1].views:
        copy_to_each(stops[0][0], sums[-1].views)


def _pass_on(source: Tensor, target: Tensor) -> None:
    """Copies from one device to the next, once the source has arrived there."""
    if source.device == target.device:
        target.copy_(source)
        return
    leaving = copy_stream(source.device, "leaving")
    leaving.wait_stream(current_stream(source.device))
    with on_streams([leaving]):
        target.copy_(source, non_blocking=True)  # the target's current stream waits for it


def _give_back(packed: Packed) -> None:
    """Memory of the chain's own is used again when the copies that leave it are through."""
    if packed.views:
        packed.flat.record_stream(copy_stream(packed.flat.device, "leaving"))
