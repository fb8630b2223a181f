"""One line, once per process, where a fit takes one device that nobody may have asked for."""

from __future__ import annotations

import sys
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info

from lightning_dp.parallel.devices import cores

_MOST_ON_CPU = 4  # that are proposed: more replicas on one processor rarely pay

is_due = True
"""Whether it is still to be said; programs whose number of devices is always told say no."""


def on_purpose() -> None:
    """From now on one device is what was asked for."""
    global is_due
    is_due = False


def hint_more_devices(accelerator: Any, device: torch.device) -> None:
    """Says what to write for several devices, if one may be what `devices="auto"` has become."""
    count = _possible(accelerator, device)
    if not is_due or count < 2:
        return
    on_purpose()
    why = ', which is what devices="auto" means there' if device.type == "cpu" else ""
    rank_zero_info(
        f"dp_custom trains on one device, {device}{why}. For {count} replicas write "
        f'devices={count}: Trainer(strategy="dp_custom", devices={count}, ...).'
    )


def _possible(accelerator: Any, device: torch.device) -> int:
    """How many there could be; 1 where a single one must have been asked for.

    A Trainer's "auto" is one on the CPU, and in an interactive session on GPUs; elsewhere all.
    """
    if device.type == "cpu":
        return min(cores(), _MOST_ON_CPU)
    return int(accelerator.auto_device_count()) if hasattr(sys, "ps1") else 1
