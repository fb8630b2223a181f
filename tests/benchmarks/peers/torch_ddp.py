"""DistributedDataParallel in a loop of plain PyTorch: a process for each device."""

from __future__ import annotations

import os

import torch
from benchmarks.job import Job
from benchmarks.models import workload
from benchmarks.pace import Pace
from benchmarks.peers.loop import run, wrapping
from benchmarks.peers.peer import Peer, backend, why_no_processes
from torch.nn.parallel import DistributedDataParallel


def train(job: Job, pace: Pace) -> None:
    """Each process with its share of every batch."""
    device = job.torch_devices[int(os.environ["LOCAL_RANK"])]
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.distributed.init_process_group(backend(job))
    model = workload(job.model).make().to(device)
    spread = wrapping(model, DistributedDataParallel)
    run(job, pace, model, job.own_batches(), device, spread)
    torch.distributed.destroy_process_group()


PEER = Peer(train, why_no_processes, is_many=True)
