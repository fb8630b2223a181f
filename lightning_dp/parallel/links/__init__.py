"""Links: copies between devices.

Decided here: who waits for a copy (`transfer`, and between accelerators `lanes`), what comes from
the host while the device computes (`ahead`), what travels together (`buckets`), is packed for that
(`packing`) and where (`staging`), how it is added up (`summing`) or passed on (`pipeline`), which
way (`routes`, and through the host `relay`), who may write to it again (`leaving`), what is in
order on a device (`streams`), and how long a device is at work (`spans`).
"""

from lightning_dp.parallel.links.ahead import Ahead as Ahead
from lightning_dp.parallel.links.ahead import can_go_ahead as can_go_ahead
from lightning_dp.parallel.links.buckets import Packed as Packed
from lightning_dp.parallel.links.buckets import can_be_packed as can_be_packed
from lightning_dp.parallel.links.buckets import kind as kind
from lightning_dp.parallel.links.packing import Arrival as Arrival
from lightning_dp.parallel.links.packing import Packing as Packing
from lightning_dp.parallel.links.spans import Span as Span
from lightning_dp.parallel.links.spans import Stretch as Stretch
from lightning_dp.parallel.links.streams import current_stream as current_stream
from lightning_dp.parallel.links.streams import host_waits_for as host_waits_for
from lightning_dp.parallel.links.streams import on_streams as on_streams
from lightning_dp.parallel.links.streams import own_stream as own_stream
from lightning_dp.parallel.links.streams import side_streams as side_streams
from lightning_dp.parallel.links.transfer import gradients_on as gradients_on
from lightning_dp.parallel.links.transfer import joining_device as joining_device
from lightning_dp.parallel.links.transfer import to_device_coalesced as to_device_coalesced
