"""Random numbers that are drawn again: an activation checkpoint's, when it computes once more.

It keeps where the generators stood, and puts them back for the backward. Where another replica has
drawn from the same generator meanwhile, it draws other numbers than before, and nobody notices.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_dp.parallel.workers.participant import current_participant


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
    return torch.get_rng_state() if device.type == "cpu" else _of_current(device.type)


def _of_current(kind: str) -> Tensor:
    state: Tensor = torch.get_device_module(kind).get_rng_state()
    return state
