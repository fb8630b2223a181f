"""The process that tests on GPUs, and its rehearsal where there are none."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import places
import sim_devices
import torch
from sim_devices import backend
from torch import Tensor

TESTS = str(Path(__file__).parent)
LIBRARY = torch.library.Library("aten", "IMPL")


def begin() -> None:
    """After this, the process has GPUs, and no simulated devices beside them."""
    if places.played:
        _play()
    else:
        # Convolutions would have 10 bits of a float32.
        torch.backends.cudnn.allow_tf32 = False
    sim_devices.enable = _refuse
    backend._enable = _refuse  # by whatever way


def _refuse(*_: Any, **__: Any) -> None:
    raise AssertionError("This process tests on GPUs: mark the test sim_only, with the reason.")


def _play() -> None:
    """Simulated devices without what they alone have, and with roundings of their own."""
    sim_devices.enable(places.played)
    theirs = torch.sim
    torch.sim = _Hidden(theirs, lambda name: False)
    shared = _Hidden(theirs, lambda name: hasattr(torch.cuda, name))
    get_device_module = torch.get_device_module

    def as_of_cuda(device: Any = None) -> Any:
        module = get_device_module(device)
        return shared if module is torch.sim else module

    torch.get_device_module = as_of_cuda
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")  # it is meant
        LIBRARY.impl("mm", _mm, "PrivateUse1")
        LIBRARY.impl("addmm", _addmm, "PrivateUse1")


class _Hidden(ModuleType):
    """A module that tests may use in part, and everything else as it is."""

    def __init__(self, module: ModuleType, may_use: Any) -> None:
        super().__init__(module.__name__)
        self.__dict__.update(_module=module, _may_use=may_use)

    def __getattr__(self, name: str) -> Any:
        asks = sys._getframe(1).f_code.co_filename
        if asks.startswith(TESTS) and not self._may_use(name):
            raise AssertionError(f"GPUs have no torch.sim.{name}: mark the test sim_only.")
        return getattr(self._module, name)


def _mm(a: Tensor, b: Tensor) -> Tensor:
    """The products, summed up in another order than the CPU's kernel has."""
    if a.shape[1] != b.shape[0]:
        raise RuntimeError(f"mat1 and mat2 shapes cannot be multiplied ({a.shape} and {b.shape})")
    wide = torch.promote_types(a.dtype, torch.float32)
    return (a.to(wide).unsqueeze(-1) * b.to(wide).unsqueeze(0)).sum(1).to(a.dtype)


def _addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    return beta * bias + alpha * _mm(a, b)
