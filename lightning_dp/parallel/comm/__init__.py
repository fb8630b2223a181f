"""Comm: copies between devices.

Decided here: which tensors share a bucket, and so a copy (`buckets`); how parameters go from the
root to all devices and sums of gradients come back (`chain`); and the order of
work on a device, and its time (`streams`).
"""

from lightning_dp.parallel.comm.buckets import Packed as Packed
from lightning_dp.parallel.comm.buckets import can_be_packed as can_be_packed
from lightning_dp.parallel.comm.buckets import gradients_on as gradients_on
from lightning_dp.parallel.comm.buckets import group as group
from lightning_dp.parallel.comm.buckets import to_device_coalesced as to_device_coalesced
from lightning_dp.parallel.comm.chain import Packing as Packing
from lightning_dp.parallel.comm.chain import are_accelerators as are_accelerators
from lightning_dp.parallel.comm.streams import DeviceTimer as DeviceTimer
from lightning_dp.parallel.comm.streams import current_stream as current_stream
from lightning_dp.parallel.comm.streams import on_streams as on_streams
from lightning_dp.parallel.comm.streams import side_streams as side_streams
from lightning_dp.parallel.comm.streams import synchronize as synchronize
from lightning_dp.parallel.comm.streams import wait_for_copies as wait_for_copies
