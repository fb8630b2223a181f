"""Landings: where buckets of several accelerators arrive on one of them, and are added up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from lightning_dp.parallel.links.lanes import Lane
from lightning_dp.parallel.links.streams import current_stream

Send: TypeAlias = Callable[[Tensor, Sequence[torch.Event]], Lane]
"""Sends a bucket to memory that is free from some events on."""


class Landing:
    """When a device's memory for a sum, and for what arrives while others are added, is free.

    What arrives waits for that, and not for anything else that the device is doing: others may send
    their gradients while it is still at work.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        now = self._mark()  # until here others may use memory that was handed out
        self._total_is_free, self._other_is_free = now, now
        self._is_at_work = False

    def add_up(
        self, total: Tensor, other: Tensor, senders: Sequence[Send], leaving: Iterable[Lane]
    ) -> None:
        """Writes the sum of what is sent into `total`; `let_go` when that was used.

        By lanes that are `leaving` something is still being sent from there.
        """
        self.settle()
        self._is_at_work = True
        first = senders[0](total, [self._total_is_free, *[lane.left() for lane in leaving]])
        for i, send in enumerate(senders[1:]):
            way = send(other, [self._other_is_free])
            if i == 0:
                first.arrive()
            way.arrive()
            total.add_(other)
            self._other_is_free = self._mark()
        if len(senders) == 1:
            first.arrive()

    def let_go(self) -> None:
        """The latest sum was used."""
        self._total_is_free = self._mark()
        self._is_at_work = False

    def settle(self) -> None:
        """Waits for what may still arrive, if the latest sum was interrupted."""
        if self._is_at_work:
            torch.accelerator.synchronize(self._device)
            self._is_at_work = False

    def _mark(self) -> torch.Event:
        return current_stream(self._device).record_event()
