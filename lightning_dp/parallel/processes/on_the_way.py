"""On the way: buckets that processes are adding up, in memory that others take after them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dp.parallel.processes.buckets import Bucket, Gradients, Piece
from lightning_dp.parallel.processes.world import World
from lightning_dp.parallel.torch_private import copy_to_each

WINDOW_BYTES = 32 * 2**20
"""What is on its way takes this much memory at most, or as much as one piece does."""


class _Sent(NamedTuple):
    piece: Piece
    row: Gradients
    flat: Tensor
    work: Any


class Room:
    """Memory that buckets pass through, of one sum after another."""

    def __init__(self) -> None:
        self.slots: list[Tensor] = []
        self.stage: Tensor | None = None  # on the gradients' device, if sums are made elsewhere

    def prepare(self, pieces: Sequence[Piece]) -> None:
        """Takes memory for pieces of one device, if there is not enough."""
        size = max(piece.bytes for piece in pieces)
        count = min(len(pieces), max(1, WINDOW_BYTES // size))
        device = pieces[0].bucket.device
        home = _home(device)
        is_kept = bool(self.slots) and self.slots[0].device == home
        if is_kept and len(self.slots[0]) >= size and len(self.slots) >= count:
            return
        if is_kept:
            size = max(size, len(self.slots[0]))
            count = min(max(count, len(self.slots)), max(1, WINDOW_BYTES // size))
        self.slots, self.stage = [], None
        if home != device:
            self.stage = torch.zeros(size, dtype=torch.uint8, device=device)
        self.slots = [torch.zeros(size, dtype=torch.uint8, device=home) for _ in range(count)]

    def leave(self) -> None:
        """Somebody may still read or write it."""
        self.slots, self.stage = [], None


class OnTheWay:
    """Adds up rows of gradients, one for each bucket, in the order of the buckets.

    Rows get their sums in place, or new tensors: for what is not there, and in the midst of a
    backward, where others may still read what it has left.
    """

    def __init__(self, buckets: Sequence[Bucket], world: World, room: Room) -> None:
        self._buckets = buckets
        self._pieces = [piece for bucket in buckets for piece in bucket.pieces]
        self._world, self._room = world, room
        self._sent: deque[_Sent] = deque()
        self._flags: list[Tensor] = []
        self._next = 0  # slot

    def prepare(self) -> None:
        """Takes the memory, if it is not there."""
        if self._pieces:
            self._room.prepare(self._pieces)
            self._slots, self._stage = self._room.slots, self._room.stage

    def clear(self) -> None:
        """Forgets what is on the way."""
        if self._sent:
            self._room.leave()
        self._sent.clear()
        self._flags = []

    def send(self, j: int, row: Gradients, *, is_early: bool, late: bool) -> None:
        """Sends a bucket, in which this process has these gradients."""
        bucket = self._buckets[j]
        flags = torch.tensor(bucket.flags(row, late=late), dtype=bucket.dtype)
        if len(bucket.pieces) > 1:
            row[0] = _as_laid_out(row[0], bucket, is_new=is_early)
        for piece in bucket.pieces:
            if len(self._sent) == len(self._slots):
                self._arrive(is_early=is_early)
            self._next = (self._next + 1) % len(self._slots)
            flat = _of(self._slots[self._next], piece)
            if self._stage is None:
                _pack(piece, flat, row, flags)
            else:
                staged = _of(self._stage, piece)
                _pack(piece, staged, row, flags)
                flat.copy_(staged)
            self._sent.append(_Sent(piece, row, flat, self._world.start_sum(flat)))

    def arrive(self) -> None:
        """Waits for all that is on the way."""
        while self._sent:
            self._arrive(is_early=False)

    def told(self) -> list[float]:
        """The sums of all buckets' flags."""
        flags, self._flags = self._flags, []
        if not flags:
            return []
        told: list[float] = torch.cat([own.double() for own in flags]).tolist()
        return told

    def _arrive(self, *, is_early: bool) -> None:
        piece, row, flat, work = self._sent[0]
        work.wait()
        if piece.has_flags:
            own = flat[-piece.bucket.num_flags :]
            self._flags.append((own.real if own.is_complex() else own).clone())
        if self._stage is not None:
            flat = _of(self._stage, piece).copy_(flat)
        _unpack(piece, flat, row, is_early=is_early)
        self._sent.popleft()


def _pack(piece: Piece, flat: Tensor, row: Gradients, flags: Tensor) -> None:
    bucket = piece.bucket
    if piece.has_flags:
        flat[-bucket.num_flags :].copy_(flags)
    if piece.part:
        flat[: len(piece.part)].copy_(piece.of(cast(Tensor, row[0])))
        return
    views = bucket.views(flat)
    sources = []
    targets = []
    for gradient, view in zip(row, views, strict=True):
        if gradient is None or gradient.layout is not torch.strided:
            view.zero_()
        else:
            targets.append(view)
            sources.append(gradient)
    if targets:
        copy_to_each(targets, sources)


def _unpack(piece: Piece, flat: Tensor, row: Gradients, *, is_early: bool) -> None:
    if piece.part:
        piece.of(cast(Tensor, row[0])).copy_(flat[: len(piece.part)])
        return
    sources, targets = [], []
    for k, view in enumerate(piece.bucket.views(flat)):
        gradient = row[k]
        if gradient is None or is_early or not _can_take(gradient, view):
            row[k] = view.clone()
        else:
            targets.append(gradient)
            sources.append(view)
    if targets:
        copy_to_each(targets, sources)


def _can_take(gradient: Tensor, like: Tensor) -> bool:
    """Whether a gradient has the strides that autograd gives it; fused optimizers rely on them."""
    is_plain = type(gradient) is Tensor and gradient.layout is torch.strided
    return is_plain and gradient.stride() == like.stride() and gradient.dtype == like.dtype


def _as_laid_out(gradient: Tensor | None, bucket: Bucket, *, is_new: bool) -> Tensor:
    """A large gradient in memory that its sum may be written to; zeros if there is none."""
    [like] = bucket.like
    if gradient is not None and not is_new and _can_take(gradient, like):
        return gradient
    own = torch.zeros_like(like, device=bucket.device)
    if gradient is not None and gradient.layout is torch.strided:
        own.copy_(gradient)
    return own


def _of(room: Tensor, piece: Piece) -> Tensor:
    return room[: piece.bytes].view(piece.bucket.dtype)


def _home(device: torch.device) -> torch.device:
    """Where processes add up what lies on a device."""
    is_there = device.type != "cpu" and dist.get_backend() != "gloo"
    return device if is_there and device.type == "cuda" else torch.device("cpu")
