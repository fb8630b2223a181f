"""What figures depend on besides the code: versions, cores, how busy the machine was."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "lightning", "lightning_dp", "accelerate", "numpy")


def machine(root: Path) -> dict[str, Any]:
    """Of this machine and of the repository in a folder."""
    return {
        "commit": commit(root),
        "python": platform.python_version(),
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
        "system": platform.platform(),
        "processor": _processor(),
        "cores": cores(),
        "load": load(),
    }


def cores() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def load() -> list[float] | None:
    """Processes that wanted to run in the last one, five and fifteen minutes; None: unknown."""
    return list(os.getloadavg()) if hasattr(os, "getloadavg") else None


def commit(root: Path) -> str:
    """The commit, with a `+` if files differ from it; "unknown" where there is none."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        head = _git(root, "rev-parse", "--short", "HEAD")
        return head + ("+" if _git(root, "status", "--porcelain", "-uno") else "")
    return "unknown"


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    return done.stdout.strip()


def _version(name: str) -> str | None:
    with contextlib.suppress(PackageNotFoundError):
        return version(name)
    return None


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
