"""Devices that are not torch's own, by private names of torch."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

out_of_tree_backend: Callable[[], str] = torch._C._get_privateuse1_backend_name
"""The name of the one kind of device that a package may add; "privateuseone" if none has."""

add_device_module: Callable[[str, ModuleType], None] = torch._register_device_module
"""Makes `torch.<kind>` a module, after which `torch.get_device_module` and others find it."""

can_take_data: Callable[[Tensor, Tensor], bool] = torch._has_compatible_shallow_copy_type
"""Whether modules that move keep a parameter and give it other data, as torch has it."""


def set_can_take_data(test: Callable[[Tensor, Tensor], bool]) -> None:
    """Puts another test in the place of `can_take_data`, for the whole process."""
    torch._has_compatible_shallow_copy_type = test  # type: ignore[assignment]  # a function of ours
