"""Lightning's own `ddp`: a process for each device."""

from __future__ import annotations

import os
from typing import Any

from benchmarks.job import Job
from benchmarks.pace import Pace
from benchmarks.peers.peer import Peer, backend, why_no_processes
from benchmarks.peers.trainer import fit
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy


def train(job: Job, pace: Pace) -> None:
    """Each process with its share of every batch."""
    rank = int(os.environ["LOCAL_RANK"])
    options: dict[str, Any] = {"process_group_backend": backend(job)}
    if job.model == "gan":
        options["find_unused_parameters"] = True  # two backwards, each of one net's parameters
    fit(
        job,
        pace,
        job.own_batches(),
        [job.torch_devices[rank]],
        devices=job.devices,
        strategy=DDPStrategy(**options),
        plugins=[LightningEnvironment()],
    )


PEER = Peer(train, why_no_processes, is_many=True)
