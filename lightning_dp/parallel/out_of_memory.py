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
from lightning_dp.parallel.devices import empty_cache, memory_text, out_of_memory_count
from lightning_dp.parallel.engine import Engine
from lightning_dp.parallel.split import Plan, Planner, Sizes

T = TypeVar("T")

log = logging.getLogger("lightning_dp")


class RecoveringEngine(Engine):
    """An engine whose steps run again where a device ran out of memory.

    It costs nothing until memory runs out, but for a snapshot of buffers where devices can.

    Args:
        module: the user's module.
        devices: the replicas' devices, root first.
        options: those of `Engine`.
    """

    def __init__(self, module: nn.Module, devices: Sequence[torch.device], **options: Any) -> None:
        super().__init__(module, devices, **options)
        self._recovery = Recovery(devices, self.planner)

    def run(self, call: ReplicaCall, batch: Any, shards: Shards | None = None) -> Any:
        """A step; where memory runs out, again with fewer samples there.

        Args:
            call: see `step`.
            batch: see `step`.
            shards: the batch, if it was cut already.
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

        What the step has logged and left on the module was right, and stays.

        Args:
            call: the step's.
            batch: the step's.
            context: makes what surrounds a step.
            error: what the backward raised; raised again if it was not the joint loss's.
        """
        gradient, self.interrupted = self.interrupted, None
        if gradient is None:
            raise error

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

    Args:
        devices: the replicas' devices.
        planner: decides which samples go where.
    """

    def __init__(self, devices: Sequence[torch.device], planner: Planner) -> None:
        self._devices = list(devices)
        self._planner = planner
        self._counts = self._count()

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

        Args:
            name: of the step, for the log and for errors.
            attempt: asks the planner for a split and does the whole step.
            trial: does the step with a part of the batch.
            undo: takes back what a half-done step or a trial has left on the module.
            error: what the first attempt has raised.
            training: whether the step trains.

        Raises:
            torch.OutOfMemoryError: no split fits; the message says the largest batch that does.
                Or the memory was not used up by a replica.
        """
        events: list[str] = []
        while True:
            batch = self._planner.latest.sizes
            text = self._note(error, events, training)
            self._clean_up(undo, everything=len(events) == 1)
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

    def _note(self, error: torch.OutOfMemoryError, events: list[str], training: bool) -> str:
        """Lowers the caps of the devices that failed; raises the error if it is none of these."""
        failed = self._failed()
        if not failed:
            raise error
        sizes = self._planner.latest.sizes
        events.append(
            ", ".join(f"{self._devices[k]} with {sizes[k]} of {sum(sizes)} samples" for k in failed)
        )
        self._planner.record_oom(failed, training=training)
        _forget(error)
        return str(error)

    def _try_parts(
        self, n: int, trial: Callable[[Plan], object], undo: Callable[[], None], training: bool
    ) -> None:
        """Finds out what fits, unless the module refuses parts (batch norm, one sample)."""
        while (plan := self._planner.trial(n, training=training)) is not None:
            try:
                trial(plan)
            except torch.OutOfMemoryError as error:
                self._note(error, [], training)
            except Exception as error:
                log.info("Looking for the largest batch that fits ended: %s", error)
                break
            else:
                self._planner.record_success(training=training)
            self._clean_up(undo)

    def _check_room(self, name: str, n: int, text: str, training: bool) -> None:
        fits = self._planner.fits(training=training)
        if sum(fits) < n:
            raise torch.OutOfMemoryError(self._no_split_fits(name, n, fits, text))

    def _no_split_fits(self, name: str, n: int, fits: Sizes, text: str) -> str:
        shares = ", ".join(f"{d} {size}" for d, size in zip(self._devices, fits, strict=True))
        return (
            f"{name}: expected a batch of at most {sum(fits)} samples, the largest that fits now "
            f"({shares}), got {n}. Make the batch smaller (accumulate_grad_batches keeps the "
            f"effective size), or use more or larger devices. The last device said: {text}"
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

    def _failed(self) -> list[int]:
        """The replicas with samples on the devices that have run out since the last look."""
        before, self._counts = self._counts, self._count()
        sizes = self._planner.latest.sizes
        return [
            k
            for k, device in enumerate(self._devices)
            if self._counts[device] > before[device] and sizes[k]
        ]

    def _count(self) -> dict[torch.device, int]:
        return {device: out_of_memory_count(device) for device in self._devices}

    def _clean_up(self, undo: Callable[[], None], *, everything: bool = False) -> None:
        undo()
        # What attempts leave is young; to look at all objects of a process takes a second.
        gc.collect(2 if everything else 1)
        for device in dict.fromkeys(self._devices):
            empty_cache(device)


def _forget(error: BaseException | None) -> None:
    """Lets go of the half-done work that an error's frames hold."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__context__
