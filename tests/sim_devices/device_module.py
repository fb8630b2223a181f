"""The module ``torch.sim``: for simulated devices what ``torch.cuda`` is for GPUs.

Wherever a device is asked for, ``None`` is the current device; an int, ``"sim:3"`` and
``torch.device("sim:3")`` are taken too.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from sim_devices import attached, links, memory, speed, virtual_time
from sim_devices.attached import DeviceLike
from sim_devices.attached import index_of as _index

Stream = torch.Stream
Event = torch.Event

_DEVICE_TYPE = 20  # of out-of-tree backends, in torch.Stream

_extension: Any = None
_initialized = False  # read by torch.utils.checkpoint
_forked = False
default_generators: tuple[torch.Generator, ...] = ()


class RaceError(RuntimeError):
    """Two accesses to memory that nothing orders, or memory that was let go too early."""


@dataclass(frozen=True)
class DeviceProperties:
    """What there is to know of a device. Its compute capability, which it has not, is 0.0."""

    name: str
    total_memory: int  # bytes; the memory limit, or the host's memory where there is none
    multi_processor_count: int = 1
    major: int = 0
    minor: int = 0


def attach(extension: ModuleType) -> None:
    """Connect to the compiled extension. Called once, by ``sim_devices.enable``."""
    global _extension, _initialized, default_generators
    _extension = attached.extension = extension
    default_generators = tuple(map(extension.default_generator, range(extension.device_count())))
    _initialized = True
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_mark_forked)


def _mark_forked() -> None:
    global _forked
    _forked = True


def is_forked() -> bool:
    """Return whether this is a forked child, in which the devices are out of reach."""
    return _forked


_is_in_bad_fork = is_forked  # torch asks for it: DataLoader workers seed every backend


# --- devices ---


def is_available() -> bool:
    """Return whether there are simulated devices."""
    return device_count() > 0


def is_initialized() -> bool:
    """Return whether ``sim_devices.enable`` has been called."""
    return _initialized


def device_count() -> int:
    """Return the number of simulated devices, 0 before ``sim_devices.enable``."""
    return int(_extension.device_count()) if _initialized else 0


def current_device() -> int:
    """Return the index of this thread's current device: where ``device="sim"`` points."""
    return int(_extension.current_device())


def set_device(device: DeviceLike) -> None:
    """Make ``device`` this thread's current device."""
    _extension.set_device(_index(device))


class device(torch.accelerator.device_index):
    """Context manager: ``with torch.sim.device(3): ...`` makes sim:3 the current device.

    Args:
        device: the device; ``None`` and negative indices change nothing, as with
            ``torch.cuda.device``.
    """

    def __init__(self, device: DeviceLike) -> None:
        none = device is None or (isinstance(device, int) and device < 0)
        super().__init__(None if none else _index(device))


def synchronize(device: DeviceLike = None) -> None:
    """Wait for all work of ``device``, and for the time that ``set_speed`` asks for."""
    _extension.synchronize(_index(device))


def get_device_name(device: DeviceLike = None) -> str:
    """Return the name of ``device``."""
    return f"Simulated device {_index(device)}"


def get_device_properties(device: DeviceLike = None) -> DeviceProperties:
    """Return name and memory of ``device``."""
    index = _index(device)
    return DeviceProperties(get_device_name(index), int(_extension.total_memory(index)))


# --- streams ---

current_stream = torch.accelerator.current_stream
set_stream = torch.accelerator.set_stream


def default_stream(device: DeviceLike = None) -> torch.Stream:
    """Return the stream of ``device`` that is current where none was chosen."""
    index = _index(device)
    return torch.Stream(stream_id=0, device_index=index, device_type=_DEVICE_TYPE)


class stream:
    """Make ``stream``, and its device, this thread's current ones; ``None`` changes nothing."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        """Make it current."""
        if self.stream is not None:
            self._device = device(self.stream.device)
            self._device.__enter__()
            self._before = current_stream(self.stream.device)
            set_stream(self.stream)

    def __exit__(self, *error: object) -> None:
        """Make those from before current."""
        if self.stream is not None:
            set_stream(self._before)
            self._device.__exit__(*error)


def host_waits() -> int:
    """Return how often the host has waited for a device, a stream or an event so far."""
    return int(_extension.host_waits())


def set_strict(strict: bool) -> None:
    """Let races between streams raise ``RaceError``, and unfinished copies look unfinished."""
    _extension.set_strict(strict)


def set_prompt(prompt: bool) -> None:
    """Let events and streams be through whenever ``query()`` asks, as they are at first.

    Else a strict device that nobody has waited for says no when it is asked first, as a busy GPU
    does. What goes on without an answer shows then: a yes puts in order all that comes after it.
    """
    _extension.set_prompt(prompt)


# --- memory ---


memory_allocated, max_memory_allocated = memory.memory_allocated, memory.max_memory_allocated
# Nothing is cached.
memory_reserved, max_memory_reserved = memory_allocated, max_memory_allocated
memory_stats = torch.accelerator.memory_stats
reset_peak_memory_stats = torch.accelerator.reset_peak_memory_stats
mem_get_info = torch.accelerator.get_memory_info
set_memory_limit, empty_cache = memory.set_memory_limit, memory.empty_cache
CopyStats, copy_stats, reset_copy_stats = (
    memory.CopyStats,
    memory.copy_stats,
    memory.reset_copy_stats,
)


# --- speed ---

set_speed, get_speed, busy_seconds = speed.set_speed, speed.get_speed, speed.busy_seconds


# --- virtual time ---

set_clock, elapsed = virtual_time.set_clock, virtual_time.elapsed
set_link, remove_link, set_links = links.set_link, links.remove_link, links.set_links
can_device_access_peer = links.can_device_access_peer
timeline, hand_over = virtual_time.timeline, virtual_time.hand_over


# --- random numbers ---


def manual_seed(seed: int) -> None:
    """Seed the current device's generator. Equal seeds give the same numbers everywhere."""
    default_generators[current_device()].manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seed the generators of all devices. ``torch.manual_seed`` calls this."""
    for generator in default_generators:
        generator.manual_seed(seed)


def initial_seed() -> int:
    """Return the seed of the current device's generator."""
    return default_generators[current_device()].initial_seed()


def get_rng_state(device: DeviceLike = None) -> torch.Tensor:
    """Return the state of the generator of ``device``, a ByteTensor on the CPU."""
    return default_generators[_index(device)].get_state()


def set_rng_state(new_state: torch.Tensor, device: DeviceLike = None) -> None:
    """Set the state of the generator of ``device`` to one that ``get_rng_state`` returned."""
    default_generators[_index(device)].set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    """Return the states of all devices' generators."""
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """Set the states of all devices' generators."""
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


# --- what PyTorch asks of a backend's module ---


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return the dtypes that autocast may use."""
    return [torch.bfloat16, torch.float16]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Return True: the CPU's kernels take bfloat16."""
    return True
