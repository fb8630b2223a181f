"""Thread state: what PyTorch keeps per thread, taken along from the caller into a worker.

Process-wide state (the default dtype, deterministic flags) is the main thread's business. So is the
number of threads that its own operations take, but for what would get in the workers' way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch.autograd.graph import saved_tensors_hooks

from lightning_dp.parallel.contexts import Contexts, Lasting
from lightning_dp.parallel.devices import current_device, hand_over
from lightning_dp.parallel.links import on_streams, side_streams
from lightning_dp.parallel.torch_private import (
    NO_MODES,
    Functions,
    Modes,
    current_modes,
    entries_of,
    graphs_of_thread,
    saved_tensors_functions,
)

Autocast: TypeAlias = tuple[str, torch.dtype, bool]
"""Its kind of devices, its dtype, and whether it keeps what it has cast."""


def is_checkpointing(functions: Functions | None) -> bool:
    """Whether tensors that are saved so are computed again (`torch.utils.checkpoint`)."""
    return functions is not None and functions[0].__module__ == "torch.utils.checkpoint"


def unpacking_in_turn(functions: Functions) -> Functions:
    """How to save tensors, so that a checkpoint's are computed again by one thread alone.

    The first tensor that a backward asks for lets a checkpoint compute all of them again. The
    threads of several devices ask at the same time.
    """
    if not is_checkpointing(functions):
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
    inference: bool = False
    autocasts: Sequence[Autocast] = ()
    modes: Modes = NO_MODES
    saved_tensors: Functions | None = None  # how to pack and unpack
    streams: Sequence[torch.Stream] = ()  # the caller's own, for there is order on them
    work_for: Callable[[], AbstractContextManager[None]] | None = None  # see `hand_over`
    have_graphs: Callable[[], None] | None = None  # see `graphs_of_thread`
    is_plain: bool = True  # on the CPU a worker has all of it from its start, but for `grad`

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
        places = devices
        if len(kinds) > 1:  # the user's code may compute on devices that no replica is on
            (kind,) = kinds - {"cpu"}
            places = [torch.device(kind, k) for k in range(torch.accelerator.device_count())]
        modes, streams = current_modes(), side_streams(places) if kinds != {"cpu"} else []
        inference, saving = torch.is_inference_mode_enabled(), saved_tensors_functions()
        work_for = None if devices[0].type == "cpu" else hand_over(devices[0])
        return cls(
            devices[0],
            torch.is_grad_enabled(),
            inference,
            autocasts,
            modes,
            saving and unpacking_in_turn(saving),
            streams,
            work_for,
            graphs_of_thread() if "cuda" in kinds else None,
            is_plain=not (inference or autocasts or any(modes) or saving or streams or work_for),
        )

    def call(self, device: torch.device, function: Callable[[Any], None], argument: Any) -> None:
        """Makes a call with this state, and with `device` as the thread's current device.

        A default device that names the root device names the replica's device here: code that
        leaves the device out means "the module's".
        """
        if self.is_plain and device.type == "cpu":
            with torch.set_grad_enabled(self.grad):
                function(argument)
            return
        if self.have_graphs is not None:
            self.have_graphs()
        modes = Modes(self._default_device_on(device), self.modes.function, self.modes.dispatch)
        with (
            nullcontext() if self.work_for is None else self.work_for(),
            # Before streams, which leave the device that was current, and so make a context on it.
            current_device(device),
            on_streams(self.streams),
            torch.inference_mode(self.inference),
            torch.set_grad_enabled(self.grad),
            self._in_modes(modes, self.autocasts),
        ):
            function(argument)

    def moved_to(self, device: torch.device) -> AbstractContextManager[None]:
        """Gives the thread that captured this state the current and default device of `call`."""
        default = self._default_device_on(device)
        modes = Modes(default if default != self.modes.default_device else None, (), ())
        return Contexts([current_device(device), self._in_modes(modes)])

    def _in_modes(
        self, modes: Modes, autocasts: Sequence[Autocast] = ()
    ) -> AbstractContextManager[Any]:
        if not (autocasts or self.saved_tensors or any(modes)):
            return nullcontext()
        casts = [torch.autocast(kind, dtype, cache_enabled=c) for kind, dtype, c in autocasts]
        saving = [saved_tensors_hooks(*self.saved_tensors)] if self.saved_tensors else []
        return Contexts([*casts, *entries_of(modes), *saving])

    def _default_device_on(self, device: torch.device) -> torch.device | None:
        default = self.modes.default_device
        return device if default == self.root else default


# An operation on much wakes a team of OpenMP's threads, which then spin for some milliseconds
# before they sleep (`GOMP_SPINCOUNT` of GNU's OpenMP). After the optimizer's step, on the CPU, the
# workers compute the next step in these milliseconds: measured, they took up to a third longer.

WAKES = 2**15
"""For more elements torch wakes a team."""

PAYS = 2**23
"""For more elements in all, a team saves more time than it takes from the workers."""


class OneThread(Lasting):
    """From `take_for` on, until it ends, the calling thread's operations take one thread."""

    def __init__(self) -> None:
        self._threads: int | None = None
        self._caller = 0

    def begin(self) -> None:
        """All is as it was."""

    def take_for(self, optimizer: Any) -> None:
        """Leaves the team asleep, if the optimizer's step is better off so."""
        groups = [group["params"] for group in optimizer.param_groups]
        sizes = [p.numel() for p in chain.from_iterable(groups) if p.grad is not None]
        if self._threads is None and max(sizes, default=0) > WAKES and sum(sizes) <= PAYS:
            self._caller, self._threads = threading.get_ident(), torch.get_num_threads()
            torch.set_num_threads(1)

    def end(self) -> None:
        """The caller's own number of threads is as before; another thread has another one."""
        if self._threads is not None and self._caller == threading.get_ident():
            torch.set_num_threads(self._threads)
            self._threads = None
