"""What a step leaves on `self`: items appended to lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lightning_dp.parallel.data_parallel import Shards
from lightning_dp.parallel.gather import gather
from lightning_dp.parallel.transfer import to_device


class AppendedLists:
    """Lists on the module to which a step appends, the usual way to collect an epoch's outputs.

    Replica 0, which is the module, appends to the list itself, the others to copies. Afterwards
    the k-th items of all replicas are gathered into the one item that one device would have
    appended. Where the replicas appended one item per sample, or different numbers of items, the
    items follow each other in shard order. A list that was changed otherwise stays as replica 0
    left it.

    Args:
        modules: the replicas; lists are looked for among the attributes of the module itself.
        shards: the step's shards.
        output_device: where the items end up.
    """

    def __init__(
        self, modules: Sequence[nn.Module], shards: Shards, output_device: torch.device
    ) -> None:
        self._output_device = output_device
        self._sizes = shards.active_sizes
        self._attributes = [modules[k].__dict__ for k in shards.active]
        root = modules[0].__dict__
        self._lists = {name: items for name, items in root.items() if type(items) is list}
        self._before = {name: list(items) for name, items in self._lists.items()}
        for attributes in self._attributes:
            if attributes is not root:
                attributes.update({name: list(items) for name, items in self._before.items()})

    def collect(self) -> None:
        """Gives the module's lists the items that the replicas appended."""
        for name, items in self._lists.items():
            tails = [
                _tail(attributes.get(name), self._before[name]) for attributes in self._attributes
            ]
            known = [tail for tail in tails if tail is not None]
            if len(known) == len(tails) and any(known):
                items[len(self._before[name]) :] = self._join(known)

    def _join(self, tails: list[list[Any]]) -> list[Any]:
        counts = [len(tail) for tail in tails]
        per_sample = counts == self._sizes and counts[0] > 1
        if per_sample or len(set(counts)) > 1:
            return [to_device(item, self._output_device) for tail in tails for item in tail]
        return [
            gather(list(items), self._output_device, self._sizes)
            for items in zip(*tails, strict=True)
        ]


def _tail(items: object, before: list[Any]) -> list[Any] | None:
    """What was appended; None if something else happened to the list."""
    if not isinstance(items, list) or len(items) < len(before):
        return None
    kept = all(a is b for a, b in zip(before, items, strict=False))
    return items[len(before) :] if kept else None
