"""What the machine has: versions, devices, links between them, compilers."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from lightning.pytorch import Trainer

from lightning_dp import DataParallelStrategy, __version__
from lightning_dp.doctor.bandwidth import measured_links
from lightning_dp.doctor.bench import muted
from lightning_dp.doctor.compilers import cxx_compiler, missing_for_sim
from lightning_dp.doctor.machine import host_memory, processor
from lightning_dp.parallel.devices import all_devices, counts_memory

PACKAGES = ("lightning-dp", "torch", "lightning", "pytorch-lightning", "torchmetrics", "hydra-core")
VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "OMP_NUM_THREADS", "MKL_NUM_THREADS",
    "NCCL_P2P_DISABLE", "NVIDIA_TF32_OVERRIDE", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF",
)  # fmt: skip


def environment(devices: Sequence[torch.device], host: Mapping[str, Any]) -> dict[str, Any]:
    """All of it, as it is in the report; the links are measured. The host was looked at before."""
    distinct = list(dict.fromkeys(devices))
    return {
        "versions": versions(),
        "machine": host,
        "gil": not _is_free_threaded(),
        "cuda": _cuda(),
        "nccl": _nccl(),
        "compilers": {"c++": cxx_compiler(), "missing_for_sim": missing_for_sim()},
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "devices": [_device(device) for device in distinct],
        "links": [link.as_json() for link in measured_links(distinct)],
        "dp_custom_takes": devices_of_dp_custom(),
    }


def versions() -> dict[str, str]:
    """Of Python and of the packages that a run depends on, as far as they are installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    found["torch"] = torch.__version__  # with the build
    found["lightning-dp"] = __version__  # of a checkout that is not installed too
    return found


def shown_devices() -> dict[str, Any]:
    """All devices of this machine, and what drives them; nothing is measured."""
    return {"cuda": _cuda(), "devices": [_device(device) for device in all_devices()]}


def _is_free_threaded() -> bool:
    is_enabled = getattr(sys, "_is_gil_enabled", lambda: True)
    return not is_enabled()


def _cuda() -> dict[str, Any] | None:
    if not torch.cuda.is_available():
        return None
    return {
        "built_for": torch.version.cuda or torch.version.hip,
        "cudnn": torch.backends.cudnn.version(),
        "driver": _driver(),
    }


def _driver() -> str | None:
    """The driver's version, where its program says it at once."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.partition("\n")[0].strip() or None


def _nccl() -> str | None:
    """The version of NCCL; None where torch has none or finds no GPU for it."""
    distributed = torch.distributed
    if not (torch.cuda.is_available() and distributed.is_available()):
        return None
    if not distributed.is_nccl_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def _device(device: torch.device) -> dict[str, Any]:
    """Name, memory and compute capability; None for what a device does not tell."""
    module: Any = None if device.type == "cpu" else torch.get_device_module(device)
    has_properties = hasattr(module, "get_device_properties")
    properties: Any = module.get_device_properties(device) if has_properties else None
    major = getattr(properties, "major", None)
    capability = None if major is None else f"{major}.{properties.minor}"
    free, total = module.mem_get_info(device) if counts_memory(device) else (None, None)
    return {
        "device": str(device),
        "name": getattr(properties, "name", None) or processor(),
        "memory_bytes": total or host_memory(),
        "free_bytes": free,
        "compute_capability": capability,
    }


def devices_of_dp_custom() -> list[str] | str:
    """What `Trainer(strategy="dp_custom")` takes here; the reason where it takes nothing."""
    try:
        with muted():
            trainer = Trainer(
                strategy=DataParallelStrategy(),
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
    except Exception as error:  # a Trainer's choice of devices may fail in any way: it is told
        return f"{type(error).__name__}: {error}"
    return [str(device) for device in getattr(trainer.strategy, "parallel_devices", None) or ()]
