"""Out of memory: a step that does not fit runs again, with fewer samples where it did not."""

from __future__ import annotations

import gc
import logging
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from lightning_dp.parallel.batch import Shards
from lightning_dp.parallel.call import ReplicaCall
from lightning_dp.parallel.devices import (
    allocated_memory,
    empty_cache,
    memory_text,
    out_of_memory_count,
)
from lightning_dp.parallel.engine import Engine
from lightning_dp.parallel.gradients import wait_for_autograd
from lightning_dp.parallel.split import Plan, Planner, Sizes

T = TypeVar("T")

log = logging.getLogger("lightning_dp")


class RecoveringEngine(Engine):
    """An engine whose steps run again where a device ran out of memory.

    It costs nothing until memory runs out, but for a snapshot of buffers where devices can.
    """

    def __init__(self, module: nn.Module, devices: Sequence[torch.device], **options: Any) -> None:
        super().__init__(module, devices, **options)
        self._recovery = Recovery(devices, self.planner)

    def run(self, call: ReplicaCall, batch: Any, shards: Shards | None = None) -> Any:
        """A step; where memory runs out, again with fewer samples there.

        The batch may have been cut already, into shards.
        """
        try:
            return self.step(call, batch if shards is None else shards)
        except torch.OutOfMemoryError as error:
            attempt, trial = partial(self.step, call, batch), partial(self._try_part, call, batch)
            return self._recovery.retry(
                call.name, attempt, trial, self.undo, error, training=call.training
            )

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

        name, trial = f"{call.name}'s backward", partial(self._try_part, call, batch)
        self._recovery.retry(name, attempt, trial, self.undo, error, training=True)

    def _try_part(self, call: ReplicaCall, batch: Any, plan: Plan) -> None:
        """Does a step with a part of its batch, and leaves no trace of it but in buffers."""
        with call.without_trace():
            with self.rerunning():
                result = self.step(call, batch, plan)
            call.finish(result)


class Recovery:
    """Runs steps again where a device ran out of memory.

    The device's cap is lowered, its samples go to the others. If no split has room for the batch,
    parts of the batch are tried until the largest batch that fits is known, for the error.
    """

    def __init__(self, devices: Sequence[torch.device], planner: Planner) -> None:
        self._devices = list(devices)
        self._planner = planner
        self._counts = self._count()
        self._clean: dict[torch.device, int] | None = None
        self._excused: set[Sizes] = set()

    def retry(
        self,
        name: str,
        attempt: Callable[[], T],
        trial: Callable[[Plan], object],
        undo: Callable[[], None],
        error: torch.OutOfMemoryError,
        *,
        training: bool,
    ) -> T:
        """Makes further attempts at a step until one fits.

        If no split fits, the error says the largest batch that does: all its parts were tried at
        once, and with one sample more each device ran out, with no garbage in its memory. What a
        step logs or keeps is left out of trials. If no replica used up the memory, the first error
        is raised again.

        Args:
            name: of the step, for the log and for errors.
            attempt: asks the planner for a split and does the whole step.
            trial: does the step with a part of the batch.
            undo: takes back what a half-done step or a trial has left on the module.
            error: what the first attempt has raised.
            training: whether the step trains.
        """
        events: list[str] = []
        self._clean, self._excused = None, set()
        while True:
            failed, text = self._failed(error), _forget(error)
            batch = self._planner.latest.sizes
            if not self._is_excused(self._clean_up(undo, failed)):
                events.append(self._said(failed))
                self._planner.record_oom(failed, training=training)
                if not self._planner.has_room(sum(batch), training=training):
                    self._try_parts(sum(batch), trial, undo, training)
                    self._check_room(name, sum(batch), text, training)
            try:
                result = attempt()
            except torch.OutOfMemoryError as again:
                error = again
            else:
                self._report(name, events)
                return result

    def _said(self, failed: list[int]) -> str:
        sizes = self._planner.latest.sizes
        of = f"of {sum(sizes)} samples"
        return ", ".join(f"{self._devices[k]} with {sizes[k]} {of}" for k in failed)

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
                self._planner.record_success(training=training)
            had_garbage = self._clean_up(undo, failed)
            if failed and not self._is_excused(had_garbage):
                self._planner.record_oom(failed, training=training)

    def _check_room(self, name: str, n: int, text: str, training: bool) -> None:
        fits = self._planner.fits(training=training)
        if sum(fits) >= n:
            return
        shares = ", ".join(f"{d} {size}" for d, size in zip(self._devices, fits, strict=True))
        raise torch.OutOfMemoryError(
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
