"""Ahead: batches that leave the host while the device still computes with the one before.

A copy on a device's current stream begins when the device is through with all that it was told,
though it waits for none of that. On a stream of its own it waits for its memory alone. That was
handed out one batch earlier, in the order of the current stream. So there is memory for two
batches and never for more, however far ahead the host is, and the host does not wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from lightning_dp.parallel.devices import memory_capacity, peak_memory
from lightning_dp.parallel.links.streams import current_stream, on_streams, own_stream

LEAST_BYTES = 2**20
"""Smaller tensors go as they are: the host takes longer to issue waits of one stream for another
than PCI Express for such a copy."""

FULL = 0.9
"""So much of a device's memory may have been in use, with that for the next batch."""

Kind: TypeAlias = tuple[torch.Size, tuple[int, ...], torch.dtype]


def can_go_ahead(tensor: Tensor) -> bool:
    """Whether a tensor is nothing but a large piece of host memory.

    Pinned or not: to copy what is pageable the driver stages it, and may wait for the stream before
    that. A stream that has nothing else to do is through at once.
    """
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and tensor.nbytes > LEAST_BYTES
        and tensor.device.type == "cpu"
        and not tensor.requires_grad
        and (tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last))
    )


class Ahead:
    """The ways from the host to some accelerators: one for each, also where a device repeats."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        # On MPS copies that do not block are not in order with others.
        own = [device for device in dict.fromkeys(devices) if device.type not in ("cpu", "mps")]
        self._rooms = {device: _Room(device) for device in own}

    def bring(
        self, tensors: Mapping[torch.device, Sequence[Tensor]]
    ) -> dict[torch.device, list[Tensor]]:
        """The tensors of those devices that have memory for them, which their current streams have.

        All of a device are one batch, of which there is one at a time. All of them `can_go_ahead`.
        """
        rooms = {device: self._rooms[device] for device in tensors if device in self._rooms}
        found = {device: room.take(tensors[device]) for device, room in rooms.items()}
        taken = {device: ready for device, ready in found.items() if ready is not None}
        try:
            with on_streams([ready.way for ready in taken.values()]):
                for device, ready in taken.items():
                    for target, source in zip(ready.memory, tensors[device], strict=True):
                        target.copy_(source, non_blocking=True)
            for ready in taken.values():
                ready.arrive()
        except BaseException:
            for ready in taken.values():  # before anybody else gets the memory
                ready.arrive()
            raise
        for room in rooms.values():
            room.make()
        return {device: ready.memory for device, ready in taken.items()}

    @property
    def has_memory(self) -> bool:
        """Whether there is memory for the next batch, on any device."""
        return any([room.is_ready for room in self._rooms.values()])


class _Ready(NamedTuple):
    """Memory for tensors of some kinds."""

    kinds: list[Kind]
    memory: list[Tensor]
    home: torch.Stream  # in whose order it was handed out
    free: torch.Event  # from then on
    way: torch.Stream  # that writes to it

    def arrive(self) -> None:
        """The stream that was current goes on when all is there."""
        self.home.wait_stream(self.way)


class _Room:
    """Memory of one device for what comes next."""

    def __init__(self, device: torch.device) -> None:
        self._way = own_stream(device, "ahead")
        self._device = device
        self._is_due = False  # the latest two batches were alike, and the next one may be, too
        self._kinds: list[Kind] = []  # of the latest batch
        self._looked_at: list[Kind] = []  # for which is known whether there is enough memory
        self._has_enough = False
        self._ready: _Ready | None = None

    @property
    def is_ready(self) -> bool:
        """Whether it has memory."""
        return self._ready is not None

    def take(self, tensors: Sequence[Tensor]) -> _Ready | None:
        """Memory for such tensors, which the way may write to; None if there is none."""
        if not tensors:
            return None
        kinds = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors]
        self._is_due = kinds == self._kinds
        ready, self._kinds, self._ready = self._ready, kinds, None
        if ready is None or ready.kinds != kinds or ready.home != current_stream(self._device):
            return None
        if ready.memory[0].is_inference() != torch.is_inference_mode_enabled():
            return None
        ready.way.wait_event(ready.free)
        return ready

    def make(self) -> None:
        """Hands out memory, in the order of the current stream."""
        if not self._is_due:
            return
        self._is_due = False
        if self._kinds != self._looked_at:
            self._looked_at, self._has_enough = self._kinds, self._looks_enough()
        if not self._has_enough:
            return
        try:
            memory = [
                torch.empty_strided(shape, stride, dtype=dtype, device=self._device)
                for shape, stride, dtype in self._kinds
            ]
        except torch.OutOfMemoryError:
            self._has_enough = False
            return
        home = current_stream(self._device)
        self._ready = _Ready(self._kinds, memory, home, home.record_event(), self._way)

    def _looks_enough(self) -> bool:
        """Whether the steps so far have left enough memory."""
        size = sum([shape.numel() * dtype.itemsize for shape, _, dtype in self._kinds])
        return peak_memory(self._device) + size <= FULL * memory_capacity(self._device)
