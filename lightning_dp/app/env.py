"""What one pastes into a report: ``python -m lightning_dp env``."""

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_dp.doctor import machine, shown_devices, versions
from lightning_dp.forecast import shown_bytes
from lightning_dp.table import ScreenParser

NAMES = (
    "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "HIP_VISIBLE_DEVICES",
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "GLIBC_TUNABLES", "NVIDIA_TF32_OVERRIDE",
    "NCCL_P2P_DISABLE", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "RANK", "LOCAL_RANK",
    "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "SLURM_NTASKS", "SLURM_PROCID",
    "SLURM_LOCALID", "SLURM_NNODES", "SLURM_NTASKS_PER_NODE",
)  # fmt: skip
"""The variables that are shown, with those that begin with ``MALLOC_``: none holds a secret."""


def collected() -> dict[str, Any]:
    """All of it; no user name, no path and no host name is in it."""
    return {
        "versions": versions(),
        "machine": machine(),
        **shown_devices(),
        "variables": variables(os.environ),
    }


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Those that matter here; a value with a path in it is left out."""
    return {
        name: "(a path)" if "/" in value or "\\" in value else value
        for name, value in sorted(environment.items())
        if name in NAMES or name.startswith("MALLOC_")
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the command line; returns the exit status."""
    parser = ScreenParser(
        "python -m lightning_dp env",
        description="Versions, machine, devices and variables, to be pasted into a report.\n"
        "Nothing secret is in it: no other variable, no path, no host name.",
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    as_json, found = parser.parse_args(arguments).json, collected()
    print(json.dumps(found, indent=2) if as_json else "\n".join(_lines(found)))
    return 0


def _lines(found: Mapping[str, Any]) -> list[str]:
    host, cuda = found["machine"], found["cuda"] or {}
    rows = {
        **found["versions"],
        "system": host["system"],
        "processor": f"{host['processor']}, {host['cores']} cores, {host['threads']} threads",
        "memory": _size(host["memory_bytes"]),
        "cuda": ", ".join(f"{k} {v}" for k, v in cuda.items() if v is not None) or "none",
    }
    for device in found["devices"]:
        rows[device["device"]] = f"{device['name']}, {_size(device['memory_bytes'])}"
    rows |= found["variables"]
    width = max(map(len, rows)) + 2
    return [f"{name:{width}}{value}" for name, value in rows.items()]


def _size(number: int | None) -> str:
    return "unknown" if number is None else shown_bytes(number)
