"""Generators of random numbers that modules have as attributes: those of a replica."""

from __future__ import annotations

import hashlib
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lightning_dp.parallel.devices import seed_apart


class OwnGenerators:
    """A replica's own generators, in the place of those on the root's device.

    A generator draws on its own device alone. What a replica's draws in a step follows from where
    the root's stands as the step begins: who sets the root's seed, or its state, sets all.
    """

    def __init__(self, k: int, source: torch.device, device: torch.device) -> None:
        self._k, self._source, self._device = k, source, device
        self.own: WeakKeyDictionary[torch.Generator, torch.Generator] = WeakKeyDictionary()

    def of(self, root: torch.Generator) -> torch.Generator:
        """The one in a generator's place, which is itself where it draws here as well."""
        if self._device == self._source or root.device != self._source:
            return root
        return self.own.setdefault(root, torch.Generator(self._device))

    def follow(self, *, alone: bool) -> None:
        """Before a step, in which the root draws nothing if `alone`: the next has other numbers."""
        for root, own in self.own.items():
            own.manual_seed(seed_apart(_number(root.get_state()), self._k))
            if alone:
                torch.rand(1, generator=root, device=root.device)


def _number(state: Tensor) -> int:
    return int.from_bytes(hashlib.blake2b(bytes(state.tolist()), digest_size=8).digest(), "big")
