"""Which devices a program takes by default, and the check of those it is told to take."""

from collections.abc import Sequence
from typing import Any

import torch
from omegaconf import OmegaConf

from lightning_dp.parallel.devices import cores, explain_cuda_ids

CPU_REPLICAS = range(2, 5)
"""How many replicas a CPU gets: one for each core, at least and at most so many."""


def register_resolvers() -> None:
    """Makes ``${default_accelerator:DEVICES}`` and ``${default_devices:ACCELERATOR}`` known."""
    OmegaConf.register_new_resolver("default_accelerator", default_accelerator, replace=True)
    OmegaConf.register_new_resolver("default_devices", default_devices, replace=True)


def default_accelerator(devices: Sequence[object] | None = None) -> str:
    """Returns trainer.accelerator's default, which the first of ``strategy.devices`` decides."""
    gpus = torch.cuda.device_count()
    if not devices:
        return "gpu" if gpus >= 2 else "cpu"
    kind = str(devices[0]).split(":")[0]
    if kind.isdigit():  # an id of the machine's accelerator
        return "gpu" if gpus else "cpu"
    return "gpu" if kind == "cuda" else kind


def default_devices(accelerator: str) -> int | str:
    """Returns trainer.devices' default: all GPUs, a CPU's replicas, else ``"auto"``."""
    if accelerator == "cpu":
        return cpu_replicas()
    if accelerator in ("gpu", "cuda"):
        return -1
    return "auto"


def cpu_replicas() -> int:
    """Returns how many replicas a CPU gets: one for each core of this process, from 2 to 4."""
    return min(max(cores(), CPU_REPLICAS[0]), CPU_REPLICAS[-1])


def check_devices(accelerator: object, devices: object) -> None:
    """Raises a ValueError, before anything is built, if there are no such CPUs or CUDA devices."""
    gpus = torch.cuda.device_count()
    if devices == "auto" or (accelerator != "cpu" and torch.backends.mps.is_available()):
        return
    if accelerator == "auto":
        accelerator = "gpu" if gpus else "cpu"
    if accelerator == "cpu":
        _check_cpu(parsed(devices))
    elif accelerator in ("gpu", "cuda"):
        _check_cuda(parsed(devices), gpus)


def parsed(devices: Any) -> Any:
    """Turns Lightning's string forms ``"3"`` and ``"0,2"`` into a number or a list of numbers."""
    if not isinstance(devices, str):
        return devices
    try:
        ids = [int(part) for part in devices.split(",") if part.strip()]
    except ValueError:
        return devices
    return ids if "," in devices or not ids else ids[0]


def _check_cpu(devices: object) -> None:
    if type(devices) is not int or devices < 1:
        raise ValueError(
            "trainer.devices: expected a number of CPU replicas, at least 1, got "
            f"{devices!r}. Try trainer.devices={cpu_replicas()}, or trainer.accelerator=gpu for "
            "GPUs; in a list, strategy.devices, a device may repeat: [cpu,cpu]."
        )


def _check_cuda(devices: object, available: int) -> None:
    if available == 0:
        raise ValueError(
            f"trainer.accelerator: expected a machine with a GPU, got none (trainer.devices="
            f"{devices!r}). Use trainer.accelerator=cpu, or install a build of torch with CUDA."
        )
    if isinstance(devices, Sequence):
        known = all(type(i) is int and i in range(available) for i in devices)
        valid = known and 0 < len(devices) == len(set(devices))
    else:
        valid = type(devices) is int and (devices == -1 or 1 <= devices <= available)
    if not valid:
        raise ValueError(
            f"trainer.devices: expected a number from 1 to {available}, -1 for all GPUs, or a list "
            f"of different ids from 0 to {available - 1}, got {devices!r}. "
            f"{explain_cuda_ids()} Leave trainer.devices "
            "out to take all GPUs; for several replicas on one GPU give strategy.devices, "
            "for example strategy.devices=[cuda:0,cuda:0]."
        )
