"""Each private name of torch in `parallel.torch_backends` does what is said of it there."""

from __future__ import annotations

from types import ModuleType

import torch
from sim_devices import torch_backends as backends
from torch import Tensor, nn


def test_get_privateuse1_backend_name() -> None:
    import sim_devices

    assert backends.out_of_tree_backend() == (
        "sim" if sim_devices.is_enabled() else "privateuseone"
    )


def test_register_device_module() -> None:
    module = ModuleType("torch.mtia")
    before = torch.mtia
    try:
        del torch.mtia
        backends.add_device_module("mtia", module)
        assert torch.get_device_module("mtia") is module is torch.mtia
    finally:
        torch.mtia = before


def test_has_compatible_shallow_copy_type_is_what_modules_ask() -> None:
    own, asked = torch._has_compatible_shallow_copy_type, []
    cpu, meta = torch.ones(1), torch.ones(1, device="meta")
    assert backends.can_take_data(cpu, cpu.double()) and not backends.can_take_data(cpu, meta)

    def refuse(tensor: Tensor, data: Tensor) -> bool:
        asked.append(tensor)
        return False

    layer = nn.Linear(1, 1, bias=False)
    weight = layer.weight
    assert layer.double().weight is weight
    backends.set_can_take_data(refuse)
    try:
        assert layer.float().weight is not weight and asked[0] is weight
    finally:
        backends.set_can_take_data(own)
    assert torch._has_compatible_shallow_copy_type is own
