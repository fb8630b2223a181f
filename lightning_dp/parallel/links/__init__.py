"""Links: copies between devices.

Decided here: who waits for a copy (`transfer`), and what travels together (`packing`).
"""

from lightning_dp.parallel.links.packing import Packed as Packed
from lightning_dp.parallel.links.packing import Packing as Packing
from lightning_dp.parallel.links.packing import can_be_packed as can_be_packed
from lightning_dp.parallel.links.packing import kind as kind
from lightning_dp.parallel.links.transfer import gradients_on as gradients_on
from lightning_dp.parallel.links.transfer import to_device_coalesced as to_device_coalesced
