"""What torch keeps per thread, captured in the caller and entered in the workers.

Grad and inference mode, autocast, the default device, torch function and dispatch modes, saved
tensor hooks, the current device and streams. Process-wide state, such as the default dtype, needs
nothing. Context variables travel with `contextvars.copy_context`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
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


class ThreadState:
    """The state of the thread that makes it, as far as it concerns work on some devices.

    Args:
        devices: the replicas' devices, the root device first.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._root, self._modes, saving = devices[0], current_modes(), saved_tensors_functions()
        kinds = {"cpu", *[device.type for device in devices]}
        places = list(devices)
        if kinds != {"cpu"}:  # the user's code may compute on devices that have no replica
            (kind,) = kinds - {"cpu"}
            places = [torch.device(kind, k) for k in range(torch.accelerator.device_count())]
        self._hand_over = hand_over(devices[0])
        self._saving = nullcontext if saving is None else _one_at_a_time(saving)
        self._contexts: list[Callable[[], AbstractContextManager[Any]]] = [
            partial(on_streams, side_streams(places)),
            partial(torch.inference_mode, torch.is_inference_mode_enabled()),
            partial(torch.set_grad_enabled, torch.is_grad_enabled()),
        ]
        caches = torch.is_autocast_cache_enabled()
        for kind in filter(torch.is_autocast_enabled, kinds):
            dtype = torch.get_autocast_dtype(kind)
            self._contexts.append(partial(torch.autocast, kind, dtype, cache_enabled=caches))

    @contextmanager
    def entered(self, device: torch.device) -> Iterator[None]:
        """Gives the calling thread, a worker, this state, with `device` as the current device."""
        with ExitStack() as stack:
            if self._hand_over is not None:
                stack.enter_context(self._hand_over())
            stack.enter_context(current_device(device))  # before streams of other devices
            for context in self._contexts:
                stack.enter_context(context())
            default = self._default_device_on(device)
            stack.enter_context(in_modes(self._modes._replace(default_device=default)))
            stack.enter_context(self._saving())
            yield

    @contextmanager
    def moved_to(self, device: torch.device) -> Iterator[None]:
        """Gives the thread that made this state another current and default device."""
        modes = Modes(self._default_device_on(device))
        with current_device(device), in_modes(modes), self._saving():
            yield

    def _default_device_on(self, device: torch.device) -> torch.device | None:
        """A default device that names the root device means "the replica's" in a replica."""
        return device if self._modes.default_device == self._root else self._modes.default_device


def _one_at_a_time(functions: Functions) -> Callable[[], AbstractContextManager[Any]]:
    """The same saved tensor hooks; those of a checkpoint for autograd threads of several devices.

    The first tensor that a backward unpacks recomputes the whole checkpoint; others wait for it.
    """
    pack, unpack = functions
    if not is_checkpointing(functions):
        return partial(saved_tensors_hooks, pack, unpack)
    lock = vars(unpack).setdefault("lightning_dp_lock", threading.RLock())

    def unpack_locked(packed: Any) -> Any:
        with lock:
            return unpack(packed)

    return partial(saved_tensors_hooks, pack, unpack_locked)
