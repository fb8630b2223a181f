"""The module ``torch.sim``: for simulated devices what ``torch.cuda`` is for GPUs.

Wherever a device is asked for, ``None`` is the current device; an int, ``"sim:3"`` and
``torch.device("sim:3")`` are taken too.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any, NamedTuple

import torch

from sim_devices import extension as _extension
from sim_devices.extension import DeviceLike
from sim_devices.extension import index_of as _index
from sim_devices.virtual_time import busy_seconds as busy_seconds
from sim_devices.virtual_time import elapsed as elapsed
from sim_devices.virtual_time import hand_over as hand_over
from sim_devices.virtual_time import set_clock as set_clock
from sim_devices.virtual_time import set_link as set_link
from sim_devices.virtual_time import set_links as set_links
from sim_devices.virtual_time import set_speed as set_speed

Stream = torch.Stream
Event = torch.Event

IS_SUPPORTED = hasattr(torch.accelerator, "memory_stats")
"""Whether this torch counts the memory of accelerators that it does not know."""

_initialized = False  # read by torch.utils.checkpoint
_forked = False
default_generators: tuple[torch.Generator, ...] = ()


class RaceError(RuntimeError):
    """Two accesses to memory that nothing orders, or memory that was let go too early."""


class CopyStats(NamedTuple):
    """Copies from one device to another: how many, and their bytes at the source."""

    copies: int
    bytes: int


def attach(extension: ModuleType) -> None:
    """Connects to the compiled extension. Called once, by ``sim_devices.enable``."""
    global _initialized, default_generators
    _extension.loaded = extension
    default_generators = tuple(map(extension.default_generator, range(extension.device_count())))
    _initialized = True
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_mark_forked)


def _mark_forked() -> None:
    global _forked
    _forked = True


def is_forked() -> bool:
    """Returns whether this is a forked child, in which the devices are out of reach."""
    return _forked


_is_in_bad_fork = is_forked  # torch asks for it: DataLoader workers seed every backend


# --- devices ---


def is_available() -> bool:
    return device_count() > 0


def is_initialized() -> bool:
    return _initialized


def device_count() -> int:
    """Returns the number of simulated devices, 0 before ``sim_devices.enable``."""
    return int(_extension.loaded.device_count()) if _initialized else 0


def current_device() -> int:
    """Returns the index of this thread's current device: where ``device="sim"`` points."""
    return int(_extension.loaded.current_device())


def set_device(device: DeviceLike) -> None:
    _extension.loaded.set_device(_index(device))


class device(torch.accelerator.device_index):
    """Context manager: ``with torch.sim.device(3): ...`` makes sim:3 the current device.

    ``None`` and negative indices change nothing, as with ``torch.cuda.device``.
    """

    def __init__(self, device: DeviceLike) -> None:
        none = device is None or (isinstance(device, int) and device < 0)
        super().__init__(None if none else _index(device))


# --- streams ---

current_stream = torch.accelerator.current_stream


def stream(stream: torch.Stream | None) -> AbstractContextManager[Any]:
    """Returns what makes ``stream``, and its device, this thread's current ones, if it is one."""
    return stream or nullcontext()


def synchronize(device: DeviceLike = None) -> None:
    _extension.loaded.synchronize(_index(device))


def host_waits() -> int:
    """Returns how often the host has waited for a device, a stream or an event so far."""
    return int(_extension.loaded.host_waits())


# --- memory ---


def memory_allocated(device: DeviceLike = None) -> int:
    """Returns the bytes in use on ``device`` now: by tensors, not by kernels' scratch memory."""
    return int(_extension.loaded.memory_allocated(_index(device)))


def max_memory_allocated(device: DeviceLike = None) -> int:
    """Returns the most bytes in use on ``device`` since ``reset_peak_memory_stats``."""
    return int(_extension.loaded.max_memory_allocated(_index(device)))


# Nothing is cached.
memory_reserved, max_memory_reserved = memory_allocated, max_memory_allocated
if IS_SUPPORTED:
    memory_stats = torch.accelerator.memory_stats
    reset_peak_memory_stats = torch.accelerator.reset_peak_memory_stats
    mem_get_info = torch.accelerator.get_memory_info


def set_memory_limit(device: DeviceLike, limit: int | None) -> None:
    """Gives ``device`` so many bytes, or the host's for None.

    Whoever asks for more gets ``torch.OutOfMemoryError``; what is in use already stays.
    """
    _extension.loaded.set_memory_limit(_index(device), limit or 0)


def empty_cache() -> None:
    """Does nothing: memory is given back when a tensor dies."""


def copy_stats() -> dict[tuple[str, str], CopyStats]:
    """Returns the copies between devices since ``reset_copy_stats``, by (source, target).

    A pair is such as ``("cpu", "sim:0")``. Copies within a device are not counted.
    """
    return {pair: CopyStats(*counts) for pair, counts in _extension.loaded.copies().items()}


def reset_copy_stats() -> None:
    _extension.loaded.reset_copies()


# --- random numbers ---


def manual_seed_all(seed: int) -> None:
    """Seeds the generators of all devices. ``torch.manual_seed`` calls this."""
    for generator in default_generators:
        generator.manual_seed(seed)


def get_rng_state(device: DeviceLike = None) -> torch.Tensor:
    return default_generators[_index(device)].get_state()


def set_rng_state(new_state: torch.Tensor, device: DeviceLike = None) -> None:
    default_generators[_index(device)].set_state(new_state)


# --- what PyTorch asks of a backend's module ---


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]
