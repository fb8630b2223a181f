"""`torch.nn.DataParallel` in a loop of plain PyTorch: one process, the loss on the first device."""

from __future__ import annotations

from benchmarks.job import Job
from benchmarks.models import WORKLOADS
from benchmarks.pace import Pace
from benchmarks.peers import comm
from benchmarks.peers.loop import run, wrapping
from benchmarks.peers.peer import Peer
from torch import nn


def train(job: Job, pace: Pace) -> None:
    """As its documentation shows: the model is called with host batches, its outputs gathered."""
    if job.device == "sim":
        comm.install()
    devices = job.torch_devices
    ids = [device.index for device in devices]
    model = WORKLOADS[job.model].make().to(devices[0])
    spread = wrapping(model, lambda part: nn.DataParallel(part, ids), always=True)
    run(
        job,
        pace,
        model,
        job.batches(),
        devices[0],
        spread,
        devices=devices,
        takes_host_batches=job.devices > 1,
    )


PEER = Peer(train, lambda job: "it does not spread on the CPU" if job.device == "cpu" else "")
