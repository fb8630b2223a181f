"""Out of memory: a step that does not fit runs again, with fewer samples where it did not."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from lightning_dp.parallel.call import ReplicaCall
from lightning_dp.parallel.contexts import replaced
from lightning_dp.parallel.devices import (
    allocated_memory,
    empty_cache,
    memory_text,
    out_of_memory_count,
)
from lightning_dp.parallel.engine import Engine
from lightning_dp.parallel.errors import described, forget_frames
from lightning_dp.parallel.reduce import wait_for_autograd

T = TypeVar("T")

log = logging.getLogger("lightning_dp")


class RecoveringEngine(Engine):
    """An engine whose steps run again where a device ran out of memory.

    The device's cap is lowered, its samples go to the others. It costs nothing until memory runs
    out, but for a snapshot of buffers where devices can.
    """

    def __init__(self, module: nn.Module, devices: Sequence[torch.device], **options: Any) -> None:
        super().__init__(module, devices, **options)
        self._failures = self._count_failures()
        self._clean: dict[torch.device, int] = {}  # bytes in use after the latest cleaning up

    def recover(self, call: ReplicaCall, batch: Any, error: torch.OutOfMemoryError) -> Any:
        """The step again, with fewer samples where memory ran out."""
        return self._retry(call, call.name, partial(self.step, call, batch), error)

    def rerun(
        self,
        call: ReplicaCall,
        batch: Any,
        context: Callable[[], AbstractContextManager[None]],
        error: torch.OutOfMemoryError,
    ) -> None:
        """Does a step and its backward again, after the joint loss's backward ran out of memory.

        What the step has logged and left on the module was right, and stays. An error is raised
        again that was not the joint loss's.
        """
        gradient, self.interrupted = self.interrupted, None
        if gradient is None:
            raise error
        wait_for_autograd(self.devices)

        def attempt() -> None:
            with context(), self.rerunning():
                result = self.step(call, batch)
            call.finish(result, gradient)

        self._retry(call, f"{call.name}'s backward", attempt, error)

    def _retry(
        self, call: ReplicaCall, name: str, attempt: Callable[[], T], error: torch.OutOfMemoryError
    ) -> T:
        """Makes further attempts at a step until one fits, or no sizes are left that may fit.

        Sizes that failed with garbage in a device's memory get a second chance, once per step. If
        no replica used up the memory, the error is raised again.
        """
        events: list[str] = []
        self._clean, had_garbage = {}, False
        while True:
            failed = self._failed(error)
            forget_frames(error)  # which hold the half-done work
            text, sizes = described(error, str), self.planner.latest.sizes
            if self._clean_up(failed) and not had_garbage:
                had_garbage = True
            else:
                where = ", ".join(f"{self.devices[k]} with {sizes[k]}" for k in failed)
                events.append(f"{where} of {sum(sizes)} samples")
                self.planner.record_oom(failed, training=call.training)
                if not self.planner.has_room(sum(sizes), training=call.training):
                    raise torch.OutOfMemoryError(
                        f"{name}: expected a batch that fits in some split, got one that ran out "
                        f"of memory on {'; then on '.join(events)}. Make the batch smaller "
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
                    self.planner.latest.sizes,
                    ", ".join(map(memory_text, dict.fromkeys(self.devices))),
                )
            return result

    def _failed(self, error: torch.OutOfMemoryError) -> list[int]:
        """The replicas with samples on the devices that have run out since the last look.

        Raises the error if there are none.
        """
        before, self._failures = self._failures, self._count_failures()
        sizes = self.planner.latest.sizes
        failed = [
            k
            for k, device in enumerate(self.devices)
            if self._failures[device] > before[device] and sizes[k]
        ]
        if not failed:
            raise error
        return failed

    def _count_failures(self) -> dict[torch.device, int]:
        return {d: out_of_memory_count(d) for d in self.devices}

    def rerunning(self) -> AbstractContextManager[None]:
        """While it lasts, replicas leave nothing behind but outputs, gradients and buffers."""
        return replaced(self, is_rerun=True)

    def undo(self) -> None:
        """Takes back what a half-done step has left on the root: buffers, gradients, hooks."""
        self.executor.rest()
        self.reducer.undo()
        if self.snapshot is not None:
            self.snapshot.restore()
        self.meter.undo()
        self.commit()

    def _clean_up(self, failed: Sequence[int]) -> bool:
        """Takes back what an attempt has left; whether there was anything to let go."""
        self.undo()
        gc.collect(1)  # what attempts leave is young
        before = self._in_use()
        self.replicas.packing.sums.give_up()
        # To look at all objects of a process takes a second.
        if any(used > self._clean.get(device, 0) for device, used in before.items()):
            gc.collect()
        for device in before:
            empty_cache(device)
        self._clean = self._in_use()
        return any(self._clean[self.devices[k]] < before[self.devices[k]] for k in failed)

    def _in_use(self) -> dict[torch.device, int]:
        return {device: allocated_memory(device) for device in self.devices}
