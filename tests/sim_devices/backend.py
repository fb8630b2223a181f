"""Turning simulated devices on."""

from __future__ import annotations

import atexit
import os
import threading
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils.backend_registration import (
    generate_methods_for_privateuse1_backend,
    rename_privateuse1_backend,
)

from sim_devices import device_module
from sim_devices.build import load_extension

DEFAULT_DEVICE_COUNT = 8
# PyTorch keeps device indices in a signed byte.
MAX_DEVICE_COUNT = 127
SECONDS_AT_EXIT = 2.0
"""So long the end of the process waits for autograd's threads, one of which may never return."""

_lock = threading.Lock()


def is_enabled() -> bool:
    """Returns whether `enable` has been called in this process."""
    return device_module.is_initialized()


def enable(device_count: int = DEFAULT_DEVICE_COUNT) -> None:
    """Makes the devices ``sim:0`` to ``sim:<device_count - 1>`` and the module ``torch.sim`` exist.

    The first call on a machine compiles a C++ extension (about a minute, cached afterwards).
    Devices stay for the life of the process: calling this again with the same count does nothing.
    ``torch.accelerator`` means the simulated devices from then on, also where a GPU is present,
    and a module that moves between the CPU and a simulated device keeps its parameter objects, as
    with GPUs.

    Raises:
        ValueError: ``device_count`` is not in 1 to 127.
        RuntimeError: devices were enabled before with another count; another out-of-tree backend
            is in use; or ninja or a compiler is missing.
    """
    if not 1 <= device_count <= MAX_DEVICE_COUNT:
        raise ValueError(
            f"device_count: expected 1 to {MAX_DEVICE_COUNT} devices, got {device_count}."
        )
    with _lock:
        if not is_enabled():
            _enable(device_count)
    enabled = device_module.device_count()
    if enabled != device_count:
        raise RuntimeError(
            f"device_count: {enabled} simulated devices are enabled already, got {device_count}. "
            "The count is fixed for a process: enable all you need, first."
        )


def _enable(device_count: int) -> None:
    backend = torch._C._get_privateuse1_backend_name()
    if backend not in ("privateuseone", "sim"):
        raise RuntimeError(
            f"PyTorch takes one out-of-tree backend per process, and {backend!r} is in use. "
            "Use simulated devices in another process."
        )
    extension = load_extension()
    rename_privateuse1_backend("sim")
    extension.initialize(device_count, _host_memory())
    extension.start_autograd_threads(device_count)
    device_module.attach(extension)
    torch._register_device_module("sim", device_module)
    generate_methods_for_privateuse1_backend()
    _let_parameters_move(extension)
    device_module.manual_seed_all(torch.initial_seed())
    extension.wake_autograd_threads(device_count)
    atexit.register(_settle_autograd_threads, extension, device_count)
    for index in range(device_count):
        device_module.reset_peak_memory_stats(index)


def _settle_autograd_threads(extension: ModuleType, device_count: int) -> None:
    """Waits until autograd's threads have let go of what the last backward gave them.

    A thread may hold the last reference to a backward's Python context after the backward has
    returned, and the process aborts if the interpreter ends meanwhile.
    """
    if device_module.is_forked():
        return  # these threads are the parent's
    extension.stop_recording()  # what is recorded has Python objects, to be freed by some thread
    extension.set_strict(False)  # no race of the program's own is found by what follows,
    for index in range(device_count):
        extension.set_memory_limit(index, 0)  # and no limit keeps it from its few bytes
    extension.settle_autograd_threads(device_count, SECONDS_AT_EXIT)


def _host_memory() -> int:
    """Bytes of the host's memory, which is what a device without a limit has."""
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 2**63 - 1  # Windows: no limit known


def _let_parameters_move(extension: ModuleType) -> None:
    """Lets ``tensor.data = ...`` cross between the CPU and simulated devices.

    PyTorch gives a module that moves to an out-of-tree device new parameters: tied ones come apart,
    and an optimizer made before keeps the old ones. It does so because it does not let
    `tensor.data` change to such a device.
    """
    own_data: Any = Tensor.data
    own_test = torch._has_compatible_shallow_copy_type

    def may_cross(tensor: Tensor, data: Tensor) -> bool:
        types = {tensor.device.type, data.device.type}
        dense = tensor.layout == data.layout == torch.strided
        plain = type(data) in (Tensor, torch.nn.Parameter)
        return dense and plain and types in ({"cpu", "sim"}, {"sim"})

    def is_compatible(tensor: Tensor, data: Tensor) -> bool:
        return bool(own_test(tensor, data)) or may_cross(tensor, data)

    def set_data(tensor: Tensor, data: Tensor) -> None:
        if not own_test(tensor, data) and may_cross(tensor, data):
            extension.set_data(tensor, data)
        else:
            own_data.__set__(tensor, data)

    torch._has_compatible_shallow_copy_type = is_compatible  # type: ignore[assignment]  # ours
    new_data = property(own_data.__get__, set_data, doc=own_data.__doc__)
    setattr(Tensor, "data", new_data)  # noqa: B010  # mypy refuses to assign to a property
