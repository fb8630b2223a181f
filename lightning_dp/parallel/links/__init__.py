"""Links: copies between devices.

Decided here: who waits for a copy (`transfer`), and what travels together (`packing`).
"""

from lightning_dp.parallel.links.packing import Packed, Packing, kind
from lightning_dp.parallel.links.transfer import gradients_on, to_device_coalesced

__all__ = [
    "Packed",
    "Packing",
    "gradients_on",
    "kind",
    "to_device_coalesced",
]
