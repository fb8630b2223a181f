"""Out of memory: a step that does not fit runs again, with fewer samples where it did not."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from lightning_dp.parallel.devices import empty_cache, out_of_memory_count
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
        self._failures = list(map(out_of_memory_count, devices))

    def retry(
        self,
        name: str,
        training: bool,
        undo: Callable[[], None],
        attempt: Callable[[], T],
        error: torch.OutOfMemoryError,
    ) -> T:
        """Makes further attempts at a step until one fits.

        Args:
            name: the step's, for errors.
            training: whether it keeps a graph.
            undo: takes back what a half-done attempt has left.
            attempt: runs the step from its batch.
            error: what the first attempt raised; raised again if no replica used up the memory.

        Raises:
            torch.OutOfMemoryError: no sizes are left that may fit.
        """
        while True:
            sizes = self._planner.latest.sizes
            failed = [k for k in self._failed() if sizes[k]]
            if not failed:
                raise error
            where = ", ".join([f"{self._devices[k]} with {sizes[k]}" for k in failed])
            where, text = f"{where} of {sum(sizes)} samples", str(error)
            forget_frames(error)  # which hold the half-done work
            undo()
            gc.collect()
            for device in dict.fromkeys(self._devices):
                empty_cache(device)
            if not self._planner.record_oom(failed, training=training):
                raise torch.OutOfMemoryError(
                    f"{name}: expected a batch that fits in some split, got one that ran out of "
                    f"memory, at last on {where}. Make the batch smaller (accumulate_grad_batches "
                    "keeps the effective size), or use more or larger devices. The device said: "
                    f"{text}"
                )
            try:
                result = attempt()
            except torch.OutOfMemoryError as again:
                error = again
                continue
            log.warning(
                "%s: out of memory on %s. The step was run again with the sizes %s; these devices "
                "get less from now on.",
                name,
                where,
                self._planner.latest.sizes,
            )
            return result

    def _failed(self) -> list[int]:
        """The replicas on the devices that have run out since the last look."""
        before, self._failures = self._failures, list(map(out_of_memory_count, self._devices))
        return [k for k, count in enumerate(self._failures) if count > before[k]]
