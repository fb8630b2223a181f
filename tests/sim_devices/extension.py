"""The compiled extension, once devices are enabled, and what devices are called by."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

DeviceLike: TypeAlias = "int | str | torch.device | None"

loaded: Any = None  # the module that `build.load_extension` returns


def index_of(device: DeviceLike) -> int:
    """The index of a simulated device; of the thread's current one for None."""
    if device is not None and not isinstance(device, int):
        given = torch.device(device)
        if given.type != "sim":
            raise ValueError(
                f"device: expected a simulated device such as 'sim:0', got {str(given)!r}."
            )
        device = given.index
    index = int(loaded.current_device()) if device is None else device
    count = 0 if loaded is None else loaded.device_count()
    if not 0 <= index < count:
        raise ValueError(
            f"device: expected one of sim:0 to sim:{count - 1}, got {index}. "
            "More devices: sim_devices.enable(device_count=...) at the start of the process."
        )
    return index
