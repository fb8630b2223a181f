"""The exchange: what the replicas of all processes say in a step, as if they were of one process.

One exchange in every step, whatever has been said: nobody else could tell a process that says
something for the first time from one that says nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from lightning_dp.metrics.logs import LogCall, names_of
from lightning_dp.metrics.one_call import StepAttributes
from lightning_dp.metrics.own_sync import OwnSyncs
from lightning_dp.metrics.wire import Call, Wire
from lightning_dp.parallel.scatter import Shards
from lightning_dp.parallel.split import Order

if TYPE_CHECKING:
    from lightning_dp.parallel.processes import Losses, World

_OF_PROCESSES = ("sync_dist", "sync_dist_group", "rank_zero_only")
"""Options of `self.log` about processes: a value of all of them is everywhere the same."""


class Said(NamedTuple):
    """The calls of replicas, with the sizes, the places in the batch and the names of these."""

    journals: list[list[Call]]
    sizes: list[int]
    order: Order | None
    names: list[str]


class Exchange:
    """Tells the processes what each other's replicas have said.

    Attributes:
        syncs: the metrics' own.
    """

    def __init__(self, world: World, device: torch.device) -> None:
        self._world, self._device = world, device
        self._wire: Wire | None = None
        self._others: list[Said | None] | None = None
        self._samples = 0
        self.syncs = OwnSyncs()

    @property
    def is_idle(self) -> bool:
        """Whether this process has no samples of the batch."""
        return self._world.is_idle

    def follow(
        self, submodules: Sequence[Sequence[nn.Module]], attributes: Mapping[int, StepAttributes]
    ) -> None:
        """From now on the replicas have these modules, and on some of the root's steps bind."""
        self._wire = Wire(submodules[0], attributes, self._device)
        for modules in submodules:
            self.syncs.follow(modules)

    def of_all(
        self, journals: Sequence[Sequence[Call]], shards: Shards, devices: Sequence[torch.device]
    ) -> Said:
        """What the replicas of all processes say, in the order of the batch.

        A step that does not fit when it is replayed, and so runs again, has heard the others: only
        what this process says is new.
        """
        calls = [[_of_batch(call) for call in own] for own in journals]
        names = names_of(shards, devices, self._world.rank)
        own = Said(calls, shards.active_sizes, shards.active_order, names)
        if self._others is None:
            self._others = self._told(own, shards.losses)
        parts = list(self._others)
        parts[self._world.rank] = None if self.is_idle else own
        joined = _joined([part for part in parts if part is not None])
        self._samples = sum(joined.sizes)
        return joined

    def end(self) -> int:
        """The step has been replayed; how many samples all processes have."""
        self._others = None
        return self._samples

    def _told(self, own: Said, losses: Sequence[Losses]) -> list[Said | None]:
        """What the others say; None for this process, and for those without samples.

        A step's losses go along.
        """
        wire = self._wire
        if wire is None:
            raise RuntimeError("Expected the modules to be known before a step ends.")
        packed = None if self.is_idle else (own[1:], wire.pack(own.journals))
        from lightning_dp.parallel.processes import check_together

        gathered = self._world.gather((packed, [own.own for own in losses]))
        check_together(gathered)
        for own_losses, *of_all in zip(losses, *[along for _, along in gathered], strict=True):
            own_losses.of_all = of_all
        ranks: list[Said | None] = []
        for rank, (other, _) in enumerate(gathered):
            if other is None or rank == self._world.rank:
                ranks.append(None)
            else:
                header, rows = other
                ranks.append(Said(wire.unpack(rows, own.journals), *header))
        return ranks


def _of_batch(call: Call) -> Call:
    if isinstance(call, LogCall) and not call.options.keys().isdisjoint(_OF_PROCESSES):
        kept = {n: v for n, v in call.options.items() if n not in _OF_PROCESSES}
        return call._replace(options=kept)
    return call


def _joined(parts: Sequence[Said]) -> Said:
    order: list[Sequence[int]] | None = None
    if any([part.order is not None for part in parts]):
        order, begin = [], 0
        for part in parts:
            for places in part.order or _in_turn(part.sizes):
                order.append([begin + place for place in places])
            begin += sum(part.sizes)
    journals = [calls for part in parts for calls in part.journals]
    sizes = [size for part in parts for size in part.sizes]
    return Said(journals, sizes, order, [name for part in parts for name in part.names])


def _in_turn(sizes: Sequence[int]) -> list[range]:
    ends = [sum(sizes[: k + 1]) for k in range(len(sizes))]
    return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]
