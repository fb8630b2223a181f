"""Which compilers there are, and the law about compiled modules."""

from __future__ import annotations

import importlib.util
import shutil

import torch

from lightning_dp.doctor.bench import Bench, Job
from lightning_dp.doctor.law import Finding, SkippedLaw
from lightning_dp.doctor.steps import after_ten_steps
from lightning_dp.doctor.subjects import Compiled

NO_DYNAMO = "sim"  # what torch's compiler does not know


def cxx_compiler() -> str | None:
    """Where the C++ compiler is that torch would call; None if there is none."""
    from torch.utils import cpp_extension

    name: str = cpp_extension.get_cxx_compiler()
    return shutil.which(name)


def has_ninja() -> bool:
    """Whether there is ninja, which builds torch's extensions."""
    from torch.utils import cpp_extension

    return bool(cpp_extension.is_ninja_available())


def missing_for_sim() -> list[str]:
    """What simulated devices need and this machine has not."""
    found = {"a C++ compiler": cxx_compiler(), "ninja": has_ninja()}
    return [name for name, there in found.items() if not there]


def no_code_for(device: torch.device) -> str:
    """Why torch.compile generates no code for a device; "" if it does."""
    if device.type == NO_DYNAMO:
        return "torch.compile does not know simulated devices"
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device.type == "cpu" and cxx_compiler() is None:
        return "no C++ compiler was found"
    return ""


def compiled_module(bench: Bench) -> Finding:
    """Layers under torch.compile."""
    if reason := no_code_for(bench.root):
        raise SkippedLaw(reason)
    job = Job(Compiled, precision="32")
    return Finding(bench.apart(job), after_ten_steps(job), remark="backend='inductor'")
