"""DistributedDataParallel in a loop of plain PyTorch: a process for each device."""

from __future__ import annotations

import os

import torch
from benchmarks.job import Job
from benchmarks.models import workload
from benchmarks.pace import Pace
from benchmarks.peers.loop import run, wrapping
from benchmarks.peers.peer import Peer, backend, why_no_processes
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


def train(job: Job, pace: Pace) -> None:
    """Each process with its share of every batch."""
    device = job.torch_devices[int(os.environ["LOCAL_RANK"])]
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.distributed.init_process_group(backend(job))
    model = workload(job.model).make().to(device)
    spread = wrapping(model, DistributedDataParallel)
    run(job, _Telling(pace) if job.logs else pace, model, job.own_batches(), device, spread)
    torch.distributed.destroy_process_group()


class _Telling(Pace):
    """The same pace; all processes are told the mean of their losses in each step."""

    def __init__(self, pace: Pace) -> None:
        vars(self).update(vars(pace))

    def step_done(self, loss: Tensor) -> bool:
        """A step is over."""
        mean = loss.detach() / torch.distributed.get_world_size()
        torch.distributed.all_reduce(mean)
        return super().step_done(mean)


PEER = Peer(train, why_no_processes, is_many=True)
