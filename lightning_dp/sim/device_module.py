"""The module ``torch.sim``: for simulated devices what ``torch.cuda`` is for GPUs.

Wherever a device is asked for, ``None`` is the current device; an int, ``"sim:3"`` and
``torch.device("sim:3")`` are taken too.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeAlias

import torch

DeviceLike: TypeAlias = "int | str | torch.device | None"

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
class CopyStats:
    """Copies from one device to another: how many, and their bytes at the source."""

    count: int
    bytes: int


@dataclass(frozen=True)
class DeviceProperties:
    """What there is to know of a device. Its compute capability, which it has not, is 0.0."""

    name: str
    total_memory: int  # bytes; the memory limit, or the host's memory where there is none
    multi_processor_count: int = 1
    major: int = 0
    minor: int = 0


def attach(extension: ModuleType) -> None:
    """Connect to the compiled extension. Called once, by ``lightning_dp.sim.enable``."""
    global _extension, _initialized, default_generators
    _extension = extension
    default_generators = tuple(map(extension.default_generator, range(extension.device_count())))
    _initialized = True
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_mark_forked)


def _mark_forked() -> None:
    global _forked
    _forked = True


def _is_in_bad_fork() -> bool:
    # DataLoader workers seed every backend; in a forked one the devices are out of reach.
    return _forked


def _index(device: DeviceLike) -> int:
    if device is not None and not isinstance(device, int):
        given = torch.device(device)
        if given.type != "sim":
            raise ValueError(
                f"device: expected a simulated device such as 'sim:0', got {str(given)!r}."
            )
        device = given.index
    index = current_device() if device is None else device
    if not 0 <= index < device_count():
        raise ValueError(
            f"device: expected one of sim:0 to sim:{device_count() - 1}, got {index}. "
            "More devices: lightning_dp.sim.enable(device_count=...) at the start of the process."
        )
    return index


# --- devices ---


def is_available() -> bool:
    """Return whether there are simulated devices."""
    return device_count() > 0


def is_initialized() -> bool:
    """Return whether ``lightning_dp.sim.enable`` has been called."""
    return _initialized


def device_count() -> int:
    """Return the number of simulated devices, 0 before ``lightning_dp.sim.enable``."""
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


# --- memory ---


def memory_allocated(device: DeviceLike = None) -> int:
    """Return the bytes in use on ``device`` now: by tensors, not by kernels' scratch memory."""
    return int(_extension.memory_allocated(_index(device)))


def max_memory_allocated(device: DeviceLike = None) -> int:
    """Return the most bytes in use on ``device`` since the start or ``reset_peak_memory_stats``."""
    return int(_extension.max_memory_allocated(_index(device)))


# Nothing is cached.
memory_reserved, max_memory_reserved = memory_allocated, max_memory_allocated


memory_stats = torch.accelerator.memory_stats
reset_peak_memory_stats = torch.accelerator.reset_peak_memory_stats
mem_get_info = torch.accelerator.get_memory_info


def set_memory_limit(device: DeviceLike, limit: int | None) -> None:
    """Let ``device`` have ``limit`` bytes, after which it raises ``torch.OutOfMemoryError``.

    What is in use already stays. After the error the device works on.

    Args:
        device: the device.
        limit: bytes, at least 1; ``None`` takes the limit away.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit: expected at least 1 byte or None for no limit, got {limit}.")
    _extension.set_memory_limit(_index(device), limit or 0)


def empty_cache() -> None:
    """Do nothing: memory is given back when a tensor dies."""


def copy_stats() -> dict[tuple[str, str], CopyStats]:
    """Return the copies between devices since the start or ``reset_copy_stats``.

    Returns: For every pair (source, target) with copies, such as ``("cpu", "sim:0")`` or
        ``("sim:0", "sim:1")``, their count and bytes. Copies within a device are not counted.
    """
    return {pair: CopyStats(*counts) for pair, counts in _extension.copies().items()}


def reset_copy_stats() -> None:
    """Start counting copies from zero."""
    _extension.reset_copies()


# --- speed ---


def set_speed(
    device: DeviceLike, *, seconds_per_op: float = 0.0, seconds_per_element: float = 0.0
) -> None:
    """Make every op on ``device`` take longer, to study imbalance.

    Each waits ``seconds_per_op + seconds_per_element * (elements of its outputs)``. The wait comes
    on top of the CPU's own time and leaves Python and the cores free, so that devices driven from
    several threads overlap, and a slow device is slow. Short waits are collected and slept in one
    go of at least 200 microseconds, at ``synchronize`` and wherever the host reads a result
    (``item``, copies to another device): sums are right, single ops may look free. Views cost
    nothing. Both zero: full speed again.

    Args:
        device: the device.
        seconds_per_op: seconds for every op.
        seconds_per_element: seconds for every element of an op's outputs.
    """
    if min(seconds_per_op, seconds_per_element) < 0:
        raise ValueError(
            "set_speed: expected seconds of at least 0, "
            f"got seconds_per_op={seconds_per_op}, seconds_per_element={seconds_per_element}."
        )
    _extension.set_speed(_index(device), seconds_per_op, seconds_per_element)


def get_speed(device: DeviceLike = None) -> tuple[float, float]:
    """Return seconds per op and per element of ``device``, as set by ``set_speed``."""
    seconds_per_op, seconds_per_element = _extension.speed(_index(device))
    return seconds_per_op, seconds_per_element


def busy_seconds(device: DeviceLike = None) -> float:
    """Return the simulated clock of ``device``: what its ops have taken by ``set_speed`` so far.

    Without a speed it stands still. Differences of it are exact, unlike the time on a wall.
    """
    return float(_extension.busy_seconds(_index(device)))


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
