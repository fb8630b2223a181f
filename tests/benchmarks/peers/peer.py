"""What a peer is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from benchmarks.job import Job
from benchmarks.pace import Pace


@dataclass(frozen=True)
class Peer:
    """A way to train.

    Args:
        train: trains at a pace until that says that it is over.
        why_not: why it cannot do a job; "" if it can.
        is_many: whether it is a process for each device.
    """

    train: Callable[[Job, Pace], None]
    why_not: Callable[[Job], str] = lambda job: ""
    is_many: bool = False


def why_no_processes(job: Job) -> str:
    """Why there cannot be a process for each device."""
    if job.device == "sim":
        return "simulated devices are in one process"
    if not torch.distributed.is_available():
        return "this torch was built without torch.distributed"
    if job.device == "cuda" and torch.cuda.device_count() < job.devices:
        return "each process needs a GPU of its own"
    return ""


def backend(job: Job) -> str:
    """The library that processes talk by."""
    return "nccl" if job.device == "cuda" else "gloo"
