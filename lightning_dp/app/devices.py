"""Which devices a program takes by default."""

from collections.abc import Sequence

import torch
from omegaconf import OmegaConf

from lightning_dp.parallel.devices import cores


def register_resolvers() -> None:
    """Registers ``${default_accelerator:}`` and ``${default_devices:}`` of ``conf/trainer``."""
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


def default_devices(accelerator: str, devices: Sequence[object] | None = None) -> int | str:
    """Returns trainer.devices' default: all GPUs, or the CPU's replicas.

    ``"auto"`` where ``strategy.devices`` names the devices, and for other accelerators.
    """
    if devices:
        return "auto"
    if accelerator == "cpu":
        return cpu_replicas()
    return -1 if accelerator in ("gpu", "cuda") else "auto"


def cpu_replicas() -> int:
    """Returns how many replicas a CPU gets: one for each core of this process, from 2 to 4."""
    return min(max(cores(), 2), 4)
