"""Parameters that stay the same objects when their module moves, as with GPUs.

PyTorch gives a module that moves to an out-of-tree device new parameters: tied ones come apart, and
an optimizer made before keeps the old ones. It does so because it does not let `tensor.data` change
to such a device; here it is let.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from sim_devices.torch_backends import can_take_data, set_can_take_data

_KINDS = ({"cpu", "sim"}, {"sim"})


def let_parameters_move(extension: ModuleType) -> None:
    """Lets ``tensor.data = ...`` cross between the CPU and simulated devices."""
    own_data: Any = Tensor.data
    own_test = can_take_data

    def may_cross(tensor: Tensor, data: Tensor) -> bool:
        dense = tensor.layout == data.layout == torch.strided
        return (
            dense
            and type(data) in (Tensor, torch.nn.Parameter)
            and ({tensor.device.type, data.device.type} in _KINDS)
        )

    def is_compatible(tensor: Tensor, data: Tensor) -> bool:
        return bool(own_test(tensor, data)) or may_cross(tensor, data)

    def set_data(tensor: Tensor, data: Tensor) -> None:
        if not own_test(tensor, data) and may_cross(tensor, data):
            extension.set_data(tensor, data)
        else:
            own_data.__set__(tensor, data)

    set_can_take_data(is_compatible)
    new_data = property(own_data.__get__, set_data, doc=own_data.__doc__)
    setattr(Tensor, "data", new_data)  # noqa: B010  # mypy refuses to assign to a property
