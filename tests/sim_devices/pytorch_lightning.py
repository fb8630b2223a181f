"""The accelerator ``sim`` for the separate package ``pytorch_lightning``, once imported."""

from pytorch_lightning.accelerators import Accelerator, AcceleratorRegistry
from pytorch_lightning.plugins.precision import MixedPrecision
from pytorch_lightning.strategies import SingleDeviceStrategy

from sim_devices import accelerator

__all__ = ["SimAccelerator"]


# An Accelerator of both packages, whose signatures name classes of their own.
class SimAccelerator(accelerator.SimAccelerator, Accelerator):  # type: ignore[misc]  # of theirs
    """Runs a Trainer of ``pytorch_lightning`` on simulated devices."""

    _single_device = SingleDeviceStrategy
    _mixed_precision = MixedPrecision


accelerator.register(SimAccelerator, AcceleratorRegistry)
