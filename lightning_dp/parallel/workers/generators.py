"""Generators of random numbers: each device draws its own, and an activation checkpoint its again.

A checkpoint keeps where the generators stood, and puts them back for the backward. Where another
replica has drawn from the same generator meanwhile, it draws other numbers than before, and nobody
notices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_dp.parallel.devices import seed_apart
from lightning_dp.parallel.workers.participant import current_participant


def generators_of(devices: Sequence[torch.device]) -> list[torch.Generator]:
    """Those of distinct devices, the root's first; without those that torch does not show."""
    found: list[torch.Generator] = []
    for device in dict.fromkeys(devices):
        if device.type == "cpu":
            found.append(torch.default_generator)
        elif hasattr(module := torch.get_device_module(device), "default_generators"):
            found.append(module.default_generators[device.index])
    return found


def draw_apart(generators: Sequence[torch.Generator]) -> None:
    """Lets the others draw other random numbers than the first one.

    `torch.manual_seed` gives all of them one seed, with which shards of one size have the same
    dropout masks. One that has the first one's seed gets one that follows from it and from its
    place.
    """
    root, *others = generators
    for place, other in enumerate(others, start=1):
        if other.initial_seed() == root.initial_seed():
            other.manual_seed(seed_apart(root.initial_seed(), place))


def begin_checkpoint() -> Callable[[], None] | None:
    """In a replica, notes from which generators it draws until what is returned is called."""
    participant = current_participant()
    if participant is None:
        return None
    calls, device = participant.calls, participant.task.device
    places = dict.fromkeys([torch.device("cpu"), device])
    before = {place: _state(place) for place in places}

    def end() -> None:
        calls.redrawn.update(p for p in places if not torch.equal(before[p], _state(p)))

    return end


def _state(device: torch.device) -> Tensor:
    """Where the generator of a device stands that is the CPU or the current one."""
    module: Any = torch if device.type == "cpu" else torch.get_device_module(device)
    state: Tensor = module.get_rng_state()
    return state
