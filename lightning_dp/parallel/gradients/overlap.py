"""Overlap: on accelerators, buckets of gradients leave while the backward still runs.

Once all replicas have a bucket, its gradients are taken off their parameters and added up on
streams of their own. What a parameter gets afterwards is a gradient of its own, for later.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from functools import partial
from operator import attrgetter
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_dp.parallel.gradients.schedule import Schedule
from lightning_dp.parallel.links import Packing, current_stream, on_streams, own_stream
from lightning_dp.parallel.torch_private import is_alone_in_memory

_GRAD = attrgetter("grad")

WATCHED = 1
"""The replica whose every gradient is looked at: in which order and on which stream it is written.

It is the first one beside the root, whose parameters are the engine's own.
"""


class _Taken(NamedTuple):
    """The gradients of a bucket that one replica has, complete from an event on."""

    gradients: Sequence[Tensor]
    ready: torch.Event


class Overlap:
    """Sends buckets of gradients while a backward fills others, one backward at a time.

    Autograd calls a hook of that parameter of each bucket which gets its gradient last. It does so
    in a thread for each device; the last one of these to come sends the bucket. All gradients of a
    bucket are written on the caller's streams, as one replica shows: else it does not leave early.
    Nothing leaves in a backward that `stays`: where devices count their own work, sums would be
    taken for work on their samples.
    """

    def __init__(self, stays: Callable[[], bool]) -> None:
        self.is_open = False  # something may be under way
        self._stays = stays
        self._packing: Packing | None = None
        self._lock = threading.Lock()
        self._handles: list[RemovableHandle] = []

    def begin(
        self, rows: Sequence[Sequence[Tensor]], packing: Packing, blocked: Collection[int]
    ) -> None:
        """A backward is to fill the gradients of these replicas, the root's first.

        Buckets with blocked positions stay.
        """
        devices = dict.fromkeys(row[0].device for row in rows)
        if len(devices) < 2 or any(device.type == "cpu" for device in devices) or self._stays():
            return
        if not packing.sums.prepare(list(devices)):
            return
        if self._packing is not packing:
            self._packing = packing
            self._schedule = Schedule([bucket.positions for bucket in packing.buckets])
        self._rows = rows
        self._callers = [current_stream(row[0].device) for row in rows]
        self._ways = {device: own_stream(device, "sums") for device in devices}
        self._there: dict[int, dict[int, _Taken]] = {}
        self._sent: list[int] = []
        self._sender = 0  # the replica whose thread has sent the latest bucket
        self._seen: dict[int, list[int]] = {}
        self.is_open = True
        self._watch(packing, set(blocked))

    def _watch(self, packing: Packing, blocked: set[int]) -> None:
        triggers = self._schedule.triggers
        for j in (*triggers, *self._schedule.unknown):
            positions = packing.buckets[j].positions
            if not blocked.isdisjoint(positions):
                continue
            self._seen[j] = []
            for i in positions:  # first: hooks are called in this order
                self._hook(self._rows[WATCHED][i], partial(self._note, j, i))
            for r, row in enumerate(self._rows if j in triggers else ()):
                self._hook(row[triggers[j]], partial(self._fill, j, r))

    def _hook(self, parameter: Tensor, call: Callable[[Tensor], None]) -> None:
        if parameter.requires_grad and parameter.is_leaf:
            self._handles.append(parameter.register_post_accumulate_grad_hook(call))

    def _note(self, j: int, i: int, _: Tensor) -> None:
        """The watched backward has filled a position of a bucket."""
        if j in self._seen and self._is_the_callers(WATCHED):
            self._seen[j].append(i)

    def _is_in_order(self, j: int, r: int) -> bool:
        """Whether all gradients of a replica's bucket are written on its caller's stream."""
        positions = cast(Packing, self._packing).buckets[j].positions
        return self._is_the_callers(r) and (r != WATCHED or positions.issubset(self._seen[j]))

    def _is_the_callers(self, r: int) -> bool:
        caller = self._callers[r]
        return current_stream(caller.device) == caller

    def _fill(self, j: int, r: int, _: Tensor) -> None:
        """A replica's backward has filled a bucket, as far as is known."""
        packing, there = cast(Packing, self._packing), self._there.setdefault(j, {})
        if not self.is_open:  # an interrupt has kept the hook from being removed
            return
        if r in there:
            self._schedule.exclude(j)
            return
        parameters = packing.buckets[j].of(self._rows[r])
        gradients: list[Tensor | None] = list(map(_GRAD, parameters))
        if not packing.sums.is_whole(gradients, j) or not self._is_in_order(j, r):
            self._schedule.forget(j)
            return
        own = list(map(_writable, gradients)) if r == 0 else gradients
        ready = self._callers[r].record_event()
        for parameter in parameters:
            parameter.grad = None
        with self._lock:
            there[r] = _Taken(own, ready)
            if len(there) == len(self._rows):
                self._send(j, r, packing)

    def _send(self, j: int, sender: int, packing: Packing) -> None:
        taken = [self._there[j][r] for r in range(len(self._rows))]
        # First for whose thread has sent the bucket before: virtual time sees no lock, and takes
        # the order of the two from this event.
        first, self._sender = self._sender, sender
        with on_streams([*self._ways.values()]):
            for r in sorted(range(len(taken)), key=lambda r: r != first):
                self._ways[self._callers[r].device].wait_event(taken[r].ready)
            self._sent.append(j)
            packing.sums.send(j, [gradients for gradients, _ in taken])

    def end(self) -> None:
        """The backward has ended; the gradients that have not left are their parameters' again."""
        if not self.is_open:
            return
        self._unhook()
        unknown = self._seen.keys() & self._schedule.unknown
        self._schedule.learn({j: self._seen[j] for j in unknown})
        for j, there in self._there.items():
            if j not in self._sent:
                for r, taken in there.items():
                    self._put_back(j, r, taken)

    def arrive(self) -> None:
        """Gives the root the sums of what has left; on the current streams they are of use."""
        if not self.is_open:
            return
        self._wait()
        for j in self._sent:
            self._put_back(j, 0, self._there[j][0])
        self._close()

    def cancel(self) -> None:
        """Forgets a backward that did not end, with its gradients that were taken."""
        if self.is_open:
            self._unhook()
            self._wait()
            self._close()

    def _unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _wait(self) -> None:
        """What is under way reads gradients, whose memory others get when they are gone."""
        for device, way in self._ways.items():
            current_stream(device).wait_stream(way)

    def _put_back(self, j: int, r: int, taken: _Taken) -> None:
        """With what has come later."""
        parameters = cast(Packing, self._packing).buckets[j].of(self._rows[r])
        for parameter, gradient in zip(parameters, taken.gradients, strict=True):
            if parameter.grad is not None:
                gradient.add_(parameter.grad)
            parameter.grad = gradient

    def _close(self) -> None:
        self.is_open = False
        self._rows, self._there, self._sent = (), {}, []


def _writable(gradient: Tensor) -> Tensor:
    """One that nobody else reads: autograd may go on with a view of what a parameter has got."""
    return gradient if is_alone_in_memory(gradient) else gradient.clone()
