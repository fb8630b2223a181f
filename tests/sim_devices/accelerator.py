"""Lightning's accelerator ``sim``: ``Trainer(accelerator="sim", devices=8)``."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator, AcceleratorRegistry
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy

from sim_devices import device_module
from sim_devices.backend import DEFAULT_DEVICE_COUNT, enable, is_enabled


class SimAccelerator(Accelerator):
    """Runs a Trainer on simulated devices.

    Devices are enabled when a Trainer first asks for them, at least 8; for another number call
    ``sim_devices.enable`` before.

    With one device Lightning gives every accelerator that it does not know the strategy
    ``SingleDeviceStrategy("cpu")``; its device is set right when the run starts
    (``trainer.strategy.root_device`` says cpu until then). The same holds for the device of
    ``precision="bf16-mixed"``.
    """

    # Classes, which the package pytorch_lightning has a second time.
    _single_device: ClassVar[type[Any]] = SingleDeviceStrategy
    _mixed_precision: ClassVar[type[Any]] = MixedPrecision

    def setup_device(self, device: torch.device) -> None:
        if device.type == "sim":
            device_module.set_device(device)

    def setup(self, trainer: Trainer) -> None:
        """Puts right what Lightning chose for an unknown accelerator, before the model moves."""
        strategy, precision = trainer.strategy, trainer.precision_plugin
        if isinstance(strategy, self._single_device) and strategy.root_device.type == "cpu":
            found = trainer._accelerator_connector._parallel_devices[0]
            strategy._root_device = torch.device(found)
        if isinstance(precision, self._mixed_precision) and precision.device == "cuda":
            precision.device = "sim"
            if precision.scaler is not None:
                precision.scaler = torch.amp.GradScaler("sim")
        self.setup_device(strategy.root_device)

    def teardown(self) -> None:
        """Does nothing: memory is given back when a tensor dies."""

    def get_device_stats(self, device: str | int | torch.device) -> dict[str, Any]:
        return {"memory_allocated": device_module.memory_allocated(device)}

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:
        """Returns ids, given a list of them or a number, in which -1 is all."""
        if devices == -1:
            devices = SimAccelerator.auto_device_count()
        return list(range(devices)) if isinstance(devices, int) else list(devices)

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        """Returns the devices with these ids, enabling them where that has not been done yet."""
        if not is_enabled():
            enable(max(DEFAULT_DEVICE_COUNT, 1 + max(devices)))
        return [torch.device("sim", index) for index in devices]

    @staticmethod
    def auto_device_count() -> int:
        return device_module.device_count() or DEFAULT_DEVICE_COUNT

    @staticmethod
    def is_available() -> bool:
        """Returns True: what is missing for compiling is said when the devices are enabled."""
        return True

    @staticmethod
    def name() -> str:
        return "sim"


def register(
    cls: type[SimAccelerator] = SimAccelerator, registry: Any = AcceleratorRegistry
) -> None:
    """Registers ``sim`` with Lightning, once."""
    if cls.name() not in registry:
        registry.register(cls.name(), cls, description="Simulated devices in host memory")
