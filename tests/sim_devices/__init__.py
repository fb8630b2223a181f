"""Simulated devices: many separate "GPUs" in host memory.

After ``enable(device_count=8)`` there are ``torch.device("sim:3")`` and the module ``torch.sim``.
Kernels are the CPU's, and numbers too, but a simulated device is separate as a GPU is: an op that
mixes tensors of two devices raises, every device counts its memory and has its own streams,
autograd thread and random generator, and accesses that no stream, event or wait orders raise
``torch.sim.RaceError``.

Importing this package registers Lightning's accelerator ``sim``; it compiles nothing.
"""

from __future__ import annotations

from sim_devices.accelerator import register
from sim_devices.backend import enable as enable
from sim_devices.backend import is_enabled as is_enabled
from sim_devices.device_module import IS_SUPPORTED as IS_SUPPORTED

register()
