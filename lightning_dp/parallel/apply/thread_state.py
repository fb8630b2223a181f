"""What torch keeps per thread, captured in the caller and entered in the workers.

Grad and inference mode, autocast, the default device, torch function and dispatch modes, saved
tensor hooks, the current device and streams. Process-wide state, such as the default dtype, needs
nothing. Context variables travel with `contextvars.copy_context`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from lightning_dp.parallel.comm import on_streams, side_streams
from lightning_dp.parallel.devices import current_device, hand_over
from lightning_dp.parallel.torch_private import (
    Functions,
    Modes,
    current_modes,
    in_modes,
    saved_tensors_functions,
)


def is_checkpointing(functions: Functions | None) -> bool:
    """Whether these saved tensor hooks are those of `torch.utils.checkpoint`."""
    return functions is not None and functions[0].__module__ == "torch.utils.checkpoint"


@dataclass(frozen=True)
class ThreadState:
    """The state of the thread that captured it, as far as it concerns work on some devices."""

    root: torch.device
    grad: bool
    inference: bool
    autocasts: Sequence[tuple[str, torch.dtype, bool]]  # device type, dtype, cache
    modes: Modes
    saved_tensors: Functions | None
    streams: Sequence[torch.Stream]  # current streams that are not the default ones
    hand_over: Callable[[], AbstractContextManager[None]] | None

    @classmethod
    def capture(cls, devices: Sequence[torch.device]) -> ThreadState:
        """The calling thread's state; devices[0] is the root device."""
        kinds = {"cpu", *[device.type for device in devices]}
        autocasts = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())
            for kind in kinds
            if torch.is_autocast_enabled(kind)
        ]
        places = list(devices)
        if kinds != {"cpu"}:  # the user's code may compute on devices that have no replica
            (kind,) = kinds - {"cpu"}
            places = [torch.device(kind, k) for k in range(torch.accelerator.device_count())]
        saving = saved_tensors_functions()
        return cls(
            devices[0],
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            autocasts,
            current_modes(),
            saving and _one_at_a_time(saving),
            side_streams(places),
            hand_over(devices[0]),
        )

    @contextmanager
    def entered(self, device: torch.device) -> Iterator[None]:
        """Gives the calling thread, a worker, this state, with `device` as the current device."""
        with ExitStack() as stack:
            if self.hand_over is not None:
                stack.enter_context(self.hand_over())
            stack.enter_context(current_device(device))  # before streams of other devices
            stack.enter_context(on_streams(self.streams))
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, dtype, caches in self.autocasts:
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=caches))
            default = self._default_device_on(device)
            stack.enter_context(in_modes(self.modes._replace(default_device=default)))
            if self.saved_tensors is not None:
                stack.enter_context(saved_tensors_hooks(*self.saved_tensors))
            yield

    @contextmanager
    def moved_to(self, device: torch.device) -> Iterator[None]:
        """Gives the thread that captured this state another current and default device."""
        saving = self.saved_tensors
        hooks = nullcontext() if saving is None else saved_tensors_hooks(*saving)
        with current_device(device), in_modes(Modes(self._default_device_on(device))), hooks:
            yield

    def _default_device_on(self, device: torch.device) -> torch.device | None:
        """A default device that names the root device means "the replica's" in a replica."""
        return device if self.modes.default_device == self.root else self.modes.default_device


def _one_at_a_time(functions: Functions) -> Functions:
    """Saved tensor hooks of a checkpoint, for the autograd threads of several devices.

    The first tensor that a backward unpacks recomputes the whole checkpoint; others wait for it.
    """
    if not is_checkpointing(functions):
        return functions
    pack, unpack = functions
    lock = vars(unpack).setdefault("lightning_dp_lock", threading.RLock())

    def unpack_locked(packed: Any) -> Any:
        with lock:
            return unpack(packed)

    return pack, unpack_locked
