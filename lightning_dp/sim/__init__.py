"""Simulated devices: many separate "GPUs" in host memory.

``enable()`` makes ``torch.device("sim:3")`` and the module ``torch.sim`` exist. Kernels are the
CPU's, and numbers too, but a simulated device is separate as a GPU is: an op that mixes tensors of
two devices raises, every device counts its memory and has its own autograd thread and random
generator.

Importing this package registers Lightning's accelerator ``sim``, where Lightning is installed; it
compiles nothing.

Example::

    import torch
    from lightning_dp import sim

    sim.enable(device_count=8)
    weight = torch.randn(4, 4, device="sim:3", requires_grad=True)
    (weight @ weight).sum().backward()
    torch.sim.max_memory_allocated(3)
"""

from __future__ import annotations

from importlib.util import find_spec

from lightning_dp.sim.backend import enable, is_enabled

__all__ = ["enable", "is_enabled"]

# With plain PyTorch the devices work all the same.
if find_spec("lightning") is not None:
    from lightning_dp.sim.accelerator import register

    register()
