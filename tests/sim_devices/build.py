"""Builds and loads the C++ extension."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import torch
from filelock import FileLock  # which torch needs too

_SOURCES = Path(__file__).parent / "csrc"
# The kernels are PyTorch's own, so that optimising this code further buys build time and no speed.
_FLAGS = ["/O1"] if sys.platform == "win32" else ["-O1", "-g0"]


def load_extension() -> ModuleType:
    """Returns the extension; builds it first if this user's cache does not hold it yet.

    The cache has a folder for every combination of sources, PyTorch, Python and flags. One process
    builds while others that ask for the same folder wait.
    """
    from torch.utils import cpp_extension

    name = _name()
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())
    folder = folder / name
    folder.mkdir(parents=True, exist_ok=True)
    complete = folder / "complete"
    # The operating system releases the lock of a build that was killed.
    with FileLock(folder / "building"):
        if complete.exists():
            return _import(name, folder / f"{name}{cpp_extension.LIB_EXT}")
        # PyTorch's own lock file outlives a killed build, and PyTorch waits for it forever.
        (folder / "lock").unlink(missing_ok=True)
        module = cpp_extension.load(
            name=name,
            sources=[str(path) for path in sorted(_SOURCES.glob("*.cpp"))],
            extra_cflags=_FLAGS,
            build_directory=str(folder),
        )
        complete.touch()
    assert isinstance(module, ModuleType)
    return module


def _name() -> str:
    digest = hashlib.sha256()
    for path in sorted(_SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    for part in (torch.__version__, str(sysconfig.get_config_var("SOABI")), sys.version, *_FLAGS):
        digest.update(part.encode())
    return f"sim_devices_{digest.hexdigest()[:16]}"


def _import(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise RuntimeError(
            f"Expected a compiled extension at {path}, found none. Delete its folder and try again."
        )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
