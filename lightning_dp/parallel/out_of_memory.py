"""Out of memory: a step that does not fit runs again, with fewer samples where it did not."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from lightning_dp.parallel.devices import empty_cache, memory_text, out_of_memory_count
from lightning_dp.parallel.errors import forget_frames
from lightning_dp.parallel.split import Planner

T = TypeVar("T")

log = logging.getLogger("lightning_dp")


class Recovery:
    """Runs steps again with smaller shards on the devices that ran out of memory.

    The planner keeps these devices' limits for the steps to come; their samples go to the others.
    """

    def __init__(self, planner: Planner, devices: Sequence[torch.device]) -> None:
        self._planner, self._devices = planner, devices
        self._failures = self._count_failures()

    def retry(
        self,
        name: str,
        training: bool,
        make_room: Callable[[], bool],
        attempt: Callable[[], T],
        error: torch.OutOfMemoryError,
    ) -> T:
        """Makes further attempts at a step until one fits.

        Args:
            name: the step's, for errors.
            training: whether it keeps a graph.
            make_room: takes back what a half-done attempt has left, and frees what can be spared;
                returns whether there was any: then the same sizes get a second chance.
            attempt: runs the step from its batch.
            error: what the first attempt raised; raised again if no replica used up the memory.

        Raises:
            torch.OutOfMemoryError: no sizes are left that may fit.
        """
        events: list[str] = []
        while True:
            failed, sizes = self._failed(error), self._planner.latest.sizes
            text = str(error)
            forget_frames(error)  # which hold the half-done work
            has_more_room = make_room()
            gc.collect()
            for device in dict.fromkeys(self._devices):
                empty_cache(device)
            if not has_more_room:
                where = ", ".join(f"{self._devices[k]} with {sizes[k]}" for k in failed)
                events.append(f"{where} of {sum(sizes)} samples")
                self._planner.record_oom(failed, training=training)
            if events and not self._planner.has_room(sum(sizes), training=training):
                raise torch.OutOfMemoryError(
                    f"{name}: expected a batch that fits in some split, got one that ran out of "
                    f"memory on {'; then on '.join(events)}. Make the batch smaller "
                    "(accumulate_grad_batches keeps the effective size), or use more or larger "
                    f"devices. The last device said: {text}"
                )
            try:
                result = attempt()
            except torch.OutOfMemoryError as again:
                error = again
                continue
            if events:
                log.warning(
                    "%s: out of memory on %s. The step was run again with the sizes %s; these "
                    "devices get less from now on. Memory now: %s.",
                    name,
                    "; then on ".join(events),
                    self._planner.latest.sizes,
                    ", ".join(map(memory_text, dict.fromkeys(self._devices))),
                )
            return result

    def _failed(self, error: torch.OutOfMemoryError) -> list[int]:
        """The replicas with samples on the devices that have run out since the last look."""
        before, self._failures = self._failures, self._count_failures()
        sizes = self._planner.latest.sizes
        failed = [
            k
            for k, device in enumerate(self._devices)
            if self._failures[device] > before[device] and sizes[k]
        ]
        if not failed:
            raise error
        return failed

    def _count_failures(self) -> dict[torch.device, int]:
        return {d: out_of_memory_count(d) for d in self._devices}
