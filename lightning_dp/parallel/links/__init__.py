"""Links: copies between devices.

Decided here: what travels together, and who waits for it (`transfer`).
"""

from lightning_dp.parallel.links.transfer import copy_coalesced as copy_coalesced
from lightning_dp.parallel.links.transfer import gradients_on as gradients_on
from lightning_dp.parallel.links.transfer import to_device_coalesced as to_device_coalesced
