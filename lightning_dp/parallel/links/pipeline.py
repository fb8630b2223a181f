"""Pipeline: what is packed on one accelerator goes out to others.

Sent to each from where it is packed, it would leave there as often as there are others, one copy
after another. Down a chain every device receives and sends at the same time, piece by piece. Where
one has no access to the next one's memory, all read it from the host's: see `relay`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor

from lightning_dp.parallel.links.lanes import Lane, lane
from lightning_dp.parallel.links.leaving import Departure
from lightning_dp.parallel.links.relay import Relay
from lightning_dp.parallel.links.routes import chain, have_access
from lightning_dp.parallel.links.streams import are_accelerators

Arrived: TypeAlias = dict[torch.device, torch.Event]
"""When something is there on each of some devices, and has been passed on."""

PIECES = 8
"""A device passes on what it has of a bucket once it has this part of it, or so many bytes.

With smaller pieces the end of the chain is reached sooner, but the host has to issue their copies:
it would take longer than the links.
"""

LEAST_BYTES = 2**20


class Pipeline:
    """The way from one accelerator to others, into memory that stays there.

    What is packed must not be written to before it has left.
    """

    def __init__(self) -> None:
        # Ways for which the current streams have not waited yet:
        self._first: set[Lane | Relay] = set()  # from what is packed,
        self._next: set[Lane] = set()  # and from device to device
        self._relays: dict[torch.device, Relay] = {}
        self._has_access: dict[tuple[torch.device, ...], bool] = {}  # each to the next, in a send
        self._same: list[tuple[Tensor, Tensor]] = []  # of one device: from where, and to where

    def send(self, here: Tensor, targets: Sequence[Tensor], departure: Departure) -> Arrived:
        """Issues the copies of a bucket; `arrive` when those of all buckets are issued.

        The departure is that of what is packed here. Nothing is written before the target's current
        stream is through with what it was told. What would not cross between accelerators is copied
        at once. Of others it is returned when it is there, and may be written to.
        """
        devices = {target.device for target in targets}
        if here.device in devices or not are_accelerators(here.device, *devices):
            copy_each(targets, [here] * len(targets))
            return {}
        tensors = {here.device: here}
        for target in targets:
            if tensors.setdefault(target.device, target) is not target:
                self._same.append((tensors[target.device], target))
        stops = tuple(reversed(chain(list(tensors))))
        relay = None if self._is_direct(stops) else self._relay_from(here.device)
        if relay is not None and relay.prepare(here.nbytes):
            there = [tensors[device] for device in stops[1:]]
            return dict(zip(stops[1:], self._carry(relay, here, there, departure), strict=True))
        return self._pass_on(tensors, [lane(*ends) for ends in pairwise(stops)], departure)

    def _is_direct(self, stops: tuple[torch.device, ...]) -> bool:
        """Whether each has access to the next, or there is but one way through the host."""
        return len(stops) == 2 or self._have_access(stops)

    def _have_access(self, stops: tuple[torch.device, ...]) -> bool:
        if stops not in self._has_access:
            self._has_access[stops] = have_access(stops)
        return self._has_access[stops]

    def wants_few_copies(self, here: torch.device, devices: Collection[torch.device]) -> bool:
        """Whether a copy takes a link long before its first byte, and does not go in pieces anyway.

        That is so between two accelerators without access: it goes through the host's memory.
        """
        stops = (here, *devices)
        return len(stops) == 2 and are_accelerators(*stops) and not self._have_access(stops)

    def _relay_from(self, device: torch.device) -> Relay:
        if device not in self._relays:
            self._relays[device] = Relay(device)
        return self._relays[device]

    def _carry(
        self, relay: Relay, here: Tensor, targets: Sequence[Tensor], departure: Departure
    ) -> list[torch.Event]:
        self._first.add(relay)  # first: an interrupt may come in between
        departure.begins(relay)
        arrived = relay.carry(here, targets)
        departure.has_begun()
        return arrived

    def _pass_on(
        self,
        tensors: Mapping[torch.device, Tensor],
        ways: Sequence[Lane],
        departure: Departure,
    ) -> Arrived:
        first, *others = ways
        here = tensors[first.source]
        self._next.update(others)  # first: an interrupt may come in between
        self._first.add(first)
        departure.begins(first)
        size = max(-(-here.numel() // PIECES), LEAST_BYTES // here.element_size())
        if not others:
            size = here.numel()
        arrived: list[torch.Event] = []
        for way in ways:
            arrived = way.pass_on(tensors[way.source], tensors[way.target], size, arrived)
        departure.has_begun()
        return {ways[-1].target: arrived[-1], **{way.source: way.left() for way in others}}

    def settle(self) -> None:
        """Begins anew: waits for what was sent, if nobody could because it was interrupted."""
        self._same.clear()
        self._has_access.clear()  # simulated links may change
        self.arrive()

    def arrive(self, later: Collection[torch.device] = ()) -> set[torch.device]:
        """The current streams go on when all is there that was sent, and has been passed on.

        For they may write to it then. Those of some devices may wait `later`; which do is returned,
        and not before these are waited for as well, by another `arrive`, is anything sent.
        """
        late = set(later) - {source.device for source, _ in self._same}
        for way in (*self._first, *self._next):
            way.arrive(late)
        for way in self._next:
            if way.source not in late:
                way.leave()
        while self._same:
            source, target = self._same.pop()
            target.copy_(source)
        if not late:
            self._first, self._next = set(), set()
        return late


def copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies tensors one by one, after what the current streams were told, and before the rest."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=are_accelerators(source.device, target.device))
