"""`torch.nn.DataParallel` in a loop of plain PyTorch: one process, the loss on the first device."""

from __future__ import annotations

from functools import partial
from typing import Any

import sim_devices
import torch
from benchmarks.job import Job
from benchmarks.models import workload
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
    model = workload(job.model).make().to(devices[0])
    spread = wrapping(model, lambda part: Known(part, ids), always=True)
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


class Known(nn.DataParallel[nn.Module]):
    """The same; on virtual time its threads are known to work for the one that waits for them.

    Else that would seem to go on with the gathering at once: an order by `join` alone is not seen.
    """

    def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> list[Any]:
        """Calls the replicas in threads."""
        work_for = torch.sim.hand_over() if sim_devices.is_enabled() else None
        if work_for is not None:
            replicas = [partial(_called, work_for, replica) for replica in replicas]
        return super().parallel_apply(replicas, inputs, kwargs)


def _called(work_for: Any, replica: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with work_for():
        return replica(*args, **kwargs)


PEER = Peer(train, lambda job: "it does not spread on the CPU" if job.device == "cpu" else "")
