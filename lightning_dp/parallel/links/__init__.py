"""Links: copies between devices.

Decided here: what travels together, and who waits for it (`transfer`).
"""

from lightning_dp.parallel.links.transfer import copy_coalesced, gradients_on, to_device_coalesced

__all__ = [
    "copy_coalesced",
    "gradients_on",
    "to_device_coalesced",
]
