"""Thread state: what PyTorch keeps per thread, taken along from the caller into a worker.

Process-wide state (the default dtype, deterministic flags) is the main thread's business.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from lightning_dp.parallel.devices import current_device
from lightning_dp.parallel.links import on_streams, side_streams
from lightning_dp.parallel.torch_private import (
    Functions,
    Modes,
    current_modes,
    enter_modes,
    saved_tensors_functions,
)


def is_checkpointing(functions: Functions | None) -> bool:
    """Whether tensors that are saved so are computed again (`torch.utils.checkpoint`)."""
    return functions is not None and functions[0].__module__ == "torch.utils.checkpoint"


def unpacking_in_turn(functions: Functions | None) -> Functions | None:
    """How to save tensors, so that a checkpoint's are computed again by one thread alone.

    The first tensor that a backward asks for lets a checkpoint compute all of them again. The
    threads of several devices ask at the same time.
    """
    if functions is None or not is_checkpointing(functions):
        return functions
    pack, unpack = functions
    turn = vars(unpack).setdefault("turn", threading.RLock())  # one for each checkpoint
    return pack, partial(_unpack_in_turn, turn, unpack)


def _unpack_in_turn(turn: Any, unpack: Callable[..., Any], packed: Any) -> Any:
    with turn:
        return unpack(packed)


@dataclass(frozen=True)
class ThreadState:
    """The modes of the thread that captured them, for other threads to enter."""

    root: torch.device
    grad: bool
    inference: bool
    autocasts: Sequence[tuple[str, torch.dtype, bool]]  # kind, dtype and whether casts are kept
    modes: Modes
    saved_tensors: Functions | None  # how to pack and unpack
    streams: Sequence[torch.Stream]  # the caller's own on the devices, for there is order on them

    @classmethod
    def capture(cls, devices: Sequence[torch.device]) -> ThreadState:
        """The calling thread's state, as far as it concerns work on `devices` (root first)."""
        kinds, autocasts = {"cpu"}, []
        for device in devices:
            kinds.add(device.type)
        for kind in kinds:
            if torch.is_autocast_enabled(kind):
                keeps = torch.is_autocast_cache_enabled()
                autocasts.append((kind, torch.get_autocast_dtype(kind), keeps))
        return cls(
            devices[0],
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            autocasts,
            current_modes(),
            unpacking_in_turn(saved_tensors_functions()),
            side_streams(devices),
        )

    @contextlib.contextmanager
    def entered(self, device: torch.device) -> Iterator[None]:
        """Gives the calling thread this state, with `device` as its current device.

        A default device that names the root device names the replica's device here: code that
        leaves the device out means "the module's".
        """
        with contextlib.ExitStack() as stack:
            if self.streams:
                stack.enter_context(on_streams(self.streams))
            stack.enter_context(current_device(device))
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, dtype, cache in self.autocasts:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=cache))
            default = self._default_device_on(device)
            enter_modes(Modes(default, self.modes.function, self.modes.dispatch), stack)
            if self.saved_tensors is not None:
                stack.enter_context(saved_tensors_hooks(*self.saved_tensors))
            yield

    @contextlib.contextmanager
    def moved_to(self, device: torch.device) -> Iterator[None]:
        """Gives the thread that captured this state the current and default device of `entered`."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(current_device(device))
            if self.saved_tensors is not None:
                stack.enter_context(saved_tensors_hooks(*self.saved_tensors))
            default = self._default_device_on(device)
            if default is not None and default != self.modes.default_device:
                enter_modes(Modes(default, (), ()), stack)
            yield

    def _default_device_on(self, device: torch.device) -> torch.device | None:
        default = self.modes.default_device
        return device if default == self.root else default
