"""The host: processor, cores, memory, and how busy it is."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import Any

import torch

from lightning_dp.parallel.devices import cores


def machine() -> dict[str, Any]:
    """What the report says of it."""
    return {
        "system": platform.platform(),
        "processor": processor(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "load": load(),
        "memory_bytes": host_memory(),
    }


def load() -> float:
    """How many processes have wanted to run in the last minute; 0 where nobody counts them."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def seconds_of_process() -> float:
    """How long this process has been there: most of it imports, which a busy machine makes slow.

    Where the system does not say, it is the processor's time, which is at most that.
    """
    own, up = Path("/proc/self/stat"), Path("/proc/uptime")
    if not (own.is_file() and up.is_file()):
        return time.process_time()
    # Behind the program's name, which may have blanks in it.
    fields = own.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    began = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return max(0.0, float(up.read_text().split()[0]) - began)


def processor() -> str:
    """Its name, which Python knows on few systems."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def host_memory() -> int | None:
    """Bytes of the host's memory; None on Windows, where Python does not know."""
    if not hasattr(os, "sysconf"):
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
