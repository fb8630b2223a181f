"""Simulated devices: many separate "GPUs" in host memory.

After ``enable(device_count=8)`` there are ``torch.device("sim:3")`` and the module ``torch.sim``.
Kernels are the CPU's, and numbers too, but a simulated device is separate as a GPU is: an op that
mixes tensors of two devices raises, every device counts its memory and has its own autograd thread
and random generator.

Importing this package registers Lightning's accelerator ``sim``; it compiles nothing.
"""

from __future__ import annotations

from lightning_dp.sim.accelerator import register
from lightning_dp.sim.backend import enable as enable
from lightning_dp.sim.backend import is_enabled as is_enabled

register()
