"""Out of memory: a step that does not fit runs again, with fewer samples where it did not."""

from __future__ import annotations

import gc
import logging
import traceback
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from lightning_dp.parallel.devices import (
    allocated_memory,
    empty_cache,
    memory_text,
    out_of_memory_count,
)
from lightning_dp.parallel.split import Plan, Planner, Sizes

T = TypeVar("T")

log = logging.getLogger("lightning_dp")


class Recovery:
    """Runs steps, and runs them again where a device ran out of memory.

    The device's cap is lowered, its samples go to the others. If no split has room for the batch,
    parts of the batch are tried until the largest batch that fits is known, for the error.

    Args:
        devices: the replicas' devices.
        planner: decides which samples go where.
    """

    def __init__(self, devices: Sequence[torch.device], planner: Planner) -> None:
        self._devices = list(devices)
        self._planner = planner
        self._counts = self._count()
        self._clean: dict[torch.device, int] | None = None
        self._excused: set[Sizes] = set()

    def run(
        self,
        name: str,
        attempt: Callable[[], T],
        trial: Callable[[Plan], object],
        undo: Callable[[], None],
        *,
        training: bool,
        failure: torch.OutOfMemoryError | None = None,
    ) -> T:
        """Makes attempts until one fits.

        Args:
            name: of the step, for the log and for errors.
            attempt: asks the planner for a split and does the whole step.
            trial: does the step with a part of the batch.
            undo: takes back what a half-done step or a trial has left on the module.
            training: whether the step trains.
            failure: what an attempt that was made already has raised.

        Raises:
            torch.OutOfMemoryError: no split fits; the message says the largest batch that does:
                all its parts were tried at once, and with one sample more each device ran out,
                with no garbage in its memory. What a step logs or keeps is left out of trials.
                Or the memory was not used up by a replica.
        """
        events: list[str] = []
        self._clean, self._excused = None, set()
        while True:
            try:
                if failure is not None:
                    raise failure
                result = attempt()
            except torch.OutOfMemoryError as error:
                failure = None
                failed, text = self._failed(error), _forget(error)
                batch = self._planner.latest.sizes
            else:
                self._report(name, events)
                return result
            if self._is_excused(self._clean_up(undo, failed)):
                continue
            events.append(self._said(failed))
            self._planner.failed(failed, training=training)
            if not self._planner.has_room(sum(batch), training=training):
                self._try_parts(sum(batch), trial, undo, training)
                self._check_room(name, sum(batch), text, training)

    def _said(self, failed: list[int]) -> str:
        sizes = self._planner.latest.sizes
        return ", ".join(
            f"{self._devices[k]} with {sizes[k]} of {sum(sizes)} samples" for k in failed
        )

    def _try_parts(
        self, n: int, trial: Callable[[Plan], object], undo: Callable[[], None], training: bool
    ) -> None:
        """Finds out what fits, unless the module refuses parts (batch norm, one sample)."""
        while (plan := self._planner.trial(n, training=training)) is not None:
            failed: list[int] = []
            try:
                trial(plan)
            except torch.OutOfMemoryError as error:
                failed = self._failed(error)
                _forget(error)
            except Exception as error:
                log.info("Looking for the largest batch that fits ended: %s", error)
                break
            else:
                self._planner.worked(training=training)
            had_garbage = self._clean_up(undo, failed)
            if failed and not self._is_excused(had_garbage):
                self._planner.failed(failed, training=training)

    def _check_room(self, name: str, n: int, text: str, training: bool) -> None:
        fits = self._planner.fits(training=training)
        if sum(fits) < n:
            raise torch.OutOfMemoryError(self._no_split_fits(name, n, fits, text))

    def _no_split_fits(self, name: str, n: int, fits: Sizes, text: str) -> str:
        shares = ", ".join(f"{d} {size}" for d, size in zip(self._devices, fits, strict=True))
        return (
            f"{name}: expected a batch of at most {sum(fits)} samples, the largest that fits now "
            f"({shares}; what a step logs or keeps comes on top), got {n}. Make the batch smaller "
            f"(accumulate_grad_batches keeps the effective size), or use more or larger devices. "
            f"The last device said: {text}"
        )

    def _report(self, name: str, events: list[str]) -> None:
        if events:
            log.warning(
                "%s: out of memory on %s. The step was run again with the sizes %s; these devices "
                "get less from now on. Memory now: %s.",
                name,
                "; then on ".join(events),
                self._planner.latest.sizes,
                ", ".join(map(memory_text, dict.fromkeys(self._devices))),
            )

    def _failed(self, error: torch.OutOfMemoryError) -> list[int]:
        """The replicas with samples on the devices that have run out since the last look.

        Raises the error if there are none.
        """
        before, self._counts = self._counts, self._count()
        sizes = self._planner.latest.sizes
        failed = [
            k
            for k, device in enumerate(self._devices)
            if self._counts[device] > before[device] and sizes[k]
        ]
        if not failed:
            raise error
        return failed

    def _count(self) -> dict[torch.device, int]:
        return {device: out_of_memory_count(device) for device in self._devices}

    def _clean_up(self, undo: Callable[[], None], failed: Sequence[int]) -> bool:
        """Takes back what an attempt has left; whether devices that failed held old garbage."""
        undo()
        gc.collect(1)  # what attempts leave is young
        before, clean = self._in_use(), self._clean or {}
        # To look at all objects of a process takes a second.
        if any(used > clean.get(device, 0) for device, used in before.items()):
            gc.collect()
        for device in before:
            empty_cache(device)
        self._clean = self._in_use()
        return any(self._clean[self._devices[k]] < before[self._devices[k]] for k in failed)

    def _is_excused(self, had_garbage: bool) -> bool:
        """Whether sizes that failed with garbage in memory get another chance, which is one."""
        sizes = self._planner.latest.sizes
        if not had_garbage or sizes in self._excused:
            return False
        self._excused.add(sizes)
        return True

    def _in_use(self) -> dict[torch.device, int]:
        return {device: allocated_memory(device) for device in self._devices}


def _forget(failure: BaseException) -> str:
    """Lets go of the half-done work that an error's frames hold; what it said."""
    error: BaseException | None = failure
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__context__
    return str(failure)


class Snapshot:
    """The values of buffers at one moment; taken again and again into the same memory."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        self._values: list[Tensor] = []

    @torch.no_grad()
    def take(self, buffers: Sequence[Tensor | None]) -> None:
        """Copies the buffers."""
        self._buffers = [buffer for buffer in buffers if buffer is not None]
        pairs = zip(self._buffers, self._values, strict=False)
        if len(self._buffers) != len(self._values) or not all(_are_alike(*pair) for pair in pairs):
            self._values = [buffer.clone() for buffer in self._buffers]
        elif self._values:
            torch._foreach_copy_(self._values, self._buffers)

    def drop(self) -> None:
        """There is nothing to restore any more; the memory is kept for the next one."""
        self._buffers = []

    @torch.no_grad()
    def restore(self) -> None:
        """Gives the buffers their values back, without a trace, as batch norm writes to its own."""
        for buffer, value in zip(self._buffers, self._values, strict=False):
            if not torch.equal(buffer, value):
                buffer.data.copy_(value)


def _are_alike(buffer: Tensor, value: Tensor) -> bool:
    return (buffer.shape, buffer.dtype, buffer.device) == (value.shape, value.dtype, value.device)
