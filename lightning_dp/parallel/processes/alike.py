"""Alike: all processes begin with the first one's module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import zip_longest

import torch
from torch import Tensor

from lightning_dp.parallel.processes.world import World

_BYTES = 32 * 2**20  # are sent at a time


@torch.no_grad()
def make_alike(tensors: Mapping[str, Tensor], world: World, what: str) -> None:
    """Gives tensors the values that the first process has.

    Args:
        tensors: by their names.
        world: the processes.
        what: what they are, for the error if another process has other ones.
    """
    told = world.gather([(name, tuple(t.shape), t.dtype) for name, t in tensors.items()])
    for rank, (own, first) in enumerate(zip(told, told[:1] * len(told), strict=True)):
        if own != first:
            pairs = zip_longest(own, first)
            a, b = next((a, b) for a, b in pairs if a != b)
            raise ValueError(
                f"Expected the same {what} in every process, got {a} in process {rank} and {b} in "
                "process 0. Build the same module in all processes."
            )
    for names in _parts(tensors):
        values = [tensors[name].detach().cpu() for name in names] if world.rank == 0 else []
        for name, value in zip(names, world.broadcast(values), strict=True):
            if world.rank > 0:
                tensors[name].copy_(value)


def _parts(tensors: Mapping[str, Tensor]) -> Iterator[list[str]]:
    part: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        part.append(name)
        size += tensor.numel() * tensor.element_size()
        if size >= _BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part
