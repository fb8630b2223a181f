"""Which devices there are: ids, names and indices turned into `torch.device`, or a clear error."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import torch

from lightning_dp.parallel.checks import expected

DeviceLike: TypeAlias = torch.device | str | int
"""A device as people write it: `torch.device("cuda", 1)`, `"cuda:1"`, `1` or `"cpu"`."""

CPU = torch.device("cpu")


def accelerator_type() -> str | None:
    """The type of this machine's accelerator (`"cuda"`, say), or None on a machine without one."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return None if accelerator is None else accelerator.type


def device_count(device_type: str) -> int:
    """How many devices of a type this process sees; 0 for a type without a usable backend."""
    if device_type == "cpu":
        return 1
    module: Any = getattr(torch, device_type, None)
    return int(module.device_count()) if hasattr(module, "device_count") else 0


def all_devices() -> list[torch.device]:
    """Every accelerator that this process sees, or the CPU if there is none."""
    kind = accelerator_type()
    gpus = [torch.device(kind, i) for i in range(device_count(kind))] if kind else []
    return gpus or [CPU]


def cores() -> int:
    """The number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# What users write


def resolve_devices(devices: Sequence[DeviceLike], key: str = "devices") -> list[torch.device]:
    """Turns what the user wrote, as the option `key`, into existing devices; one may repeat."""
    if isinstance(devices, str) or not isinstance(devices, Sequence):
        wanted = "a list such as ['cuda:0', 'cuda:1'] or ['cpu', 'cpu']"
        raise expected(key, wanted, devices, "Put the device into a list.")
    if not devices:
        raise expected(key, "at least one device", devices)
    return [_existing(entry, f"{key}[{i}]") for i, entry in enumerate(devices)]


def resolve_output_device(
    output_device: DeviceLike | None, devices: Sequence[torch.device]
) -> torch.device:
    """The device where loss, logs and gathered outputs end up: the root by default.

    An integer is the id of a device of the root's type; for CPU replicas, the index of a replica.
    """
    if output_device is None:
        return devices[0]
    if isinstance(output_device, str) and output_device.isdigit():
        output_device = int(output_device)  # as a command line gives it
    if type(output_device) is not int:
        return _existing(output_device, "output_device")
    if devices[0].type != "cpu":
        return _existing(f"{devices[0].type}:{output_device}", "output_device")
    if not 0 <= output_device < len(devices):
        wanted = f"an index of a CPU replica from 0 to {len(devices) - 1}, a device name or None"
        raise expected("output_device", wanted, output_device, "Choose one of these.")
    return devices[output_device]


def minus_one_is_cpu(device: Any) -> Any:
    """Translates -1, by which `torch.nn.parallel` means the CPU."""
    return "cpu" if type(device) is int and device == -1 else device


def _existing(entry: DeviceLike, key: str) -> torch.device:
    """A device of this machine, with its index."""
    name, kind = entry, accelerator_type()
    if isinstance(entry, bool) or not isinstance(entry, torch.device | int | str):
        raise expected(key, "a device, its name or its id", entry)
    if isinstance(entry, int) or (isinstance(entry, str) and entry.isdigit()):
        if kind is None:
            wanted = "'cpu', since this machine has no accelerator"
            raise expected(key, wanted, entry, "Write ['cpu'] * K for K replicas.")
        name = f"{kind}:{entry}"
    try:
        device = torch.device(name)
    except (RuntimeError, ValueError):
        wanted = "a device name such as 'cuda:1' or 'cpu', or an id from 0"
        raise expected(key, wanted, entry, "Correct the spelling.") from None
    count = device_count(device.type)
    if (device.index or 0) >= count:
        wanted = f"one of {device.type}:0 to {device.type}:{count - 1}"
        if device.type == "cpu":
            wanted = "'cpu' (the CPU is one device, which may repeat)"
        elif count == 0:
            wanted = f"a device of this machine, which has no usable {device.type!r} device"
        raise expected(key, wanted, entry, "Choose a device that exists.")
    return CPU if device.type == "cpu" else torch.device(device.type, device.index or 0)


def replica_names(devices: Sequence[torch.device], process: int | None = None) -> list[str]:
    """The replicas' names in logs, errors, tables and pictures.

    A device's name, with a number if several replicas share the device, and with the rank if there
    are several processes.

    Example:
        >>> replica_names([torch.device("cpu")] * 2)
        ['cpu:0', 'cpu:1']
        >>> replica_names([torch.device(name) for name in ("cuda:0", "cuda:0", "cuda:1")], 3)
        ['process3/cuda:0:0', 'process3/cuda:0:1', 'process3/cuda:1']
    """
    prefix = "" if process is None else f"process{process}/"
    numbers = [
        f":{devices[:k].count(d)}" if devices.count(d) > 1 else "" for k, d in enumerate(devices)
    ]
    return [f"{prefix}{device}{number}" for device, number in zip(devices, numbers, strict=True)]


def replica_text(k: int, names: Sequence[str]) -> str:
    """Formats replica k for messages, given the names of all."""
    return f"replica {k} on {names[k]}"


# Memory: 0 for the CPU, and for devices that do not report it


def _call(device: torch.device, name: str) -> Any:
    module: Any = None if device.type == "cpu" else torch.get_device_module(device)
    return getattr(module, name)(device) if hasattr(module, name) else 0


def peak_memory(device: torch.device) -> int:
    """The most bytes in use on a device since `reset_peak_memory`."""
    return int(_call(device, "max_memory_allocated"))


def allocated_memory(device: torch.device) -> int:
    """The bytes in use on a device now."""
    return int(_call(device, "memory_allocated"))


def reset_peak_memory(device: torch.device) -> None:
    """Starts a new peak."""
    _call(device, "reset_peak_memory_stats")


def out_of_memory_count(device: torch.device) -> int:
    """How often a device has run out of memory so far."""
    return int((_call(device, "memory_stats") or {}).get("num_ooms", 0))


def memory_capacity(device: torch.device) -> int:
    """The bytes that this process has reserved on a device, and those that are free there."""
    free, _ = _call(device, "mem_get_info") or (0, 0)
    return int(free + _call(device, "memory_reserved"))


def memory_capacities(devices: Sequence[torch.device], *, must_count: bool = True) -> list[int]:
    """The `memory_capacity` of each device; zeros if all are the CPU, whose memory is shared."""
    found = list(map(memory_capacity, devices))
    if must_count and not all(found) and any(device.type != "cpu" for device in devices):
        wanted = "devices that count their memory, such as GPUs"
        hint = "Use weights=[...] for fixed shares."
        raise expected("split='memory'", wanted, [*map(str, devices)], hint)
    return found


def empty_cache(device: torch.device) -> None:
    """Returns cached memory to a device."""
    if device.type != "cpu" and hasattr(torch.get_device_module(device), "empty_cache"):
        with current_device(device):
            torch.get_device_module(device).empty_cache()


def current_device(device: torch.device) -> AbstractContextManager[Any]:
    """Makes `device` the calling thread's current one for a while."""
    if device.type == "cpu":
        return nullcontext()
    context: AbstractContextManager[Any] = torch.get_device_module(device).device(device)
    return context


def seed_apart(seed: int, place: int) -> int:
    """Derives the seed of the device at a place in the list; at place 0 it is `seed`."""
    return (seed + place * 0x9E3779B97F4A7C15) % 2**63  # an odd factor: all places differ
