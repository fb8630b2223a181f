"""Hugging Face Accelerate in a loop of plain PyTorch: a process for each device."""

from __future__ import annotations

import os
from importlib.util import find_spec

from benchmarks.job import Job
from benchmarks.models import workload
from benchmarks.pace import Pace
from benchmarks.peers.loop import optimizers_of, run, wrapping
from benchmarks.peers.peer import Peer, why_no_processes


def train(job: Job, pace: Pace) -> None:
    """Each process with its share of every batch."""
    from accelerate import Accelerator

    if job.device == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
    accelerator = Accelerator()
    model = workload(job.model).make().to(accelerator.device)
    optimizers = [accelerator.prepare(optimizer) for optimizer in optimizers_of(model)]
    spread = wrapping(model, accelerator.prepare)
    run(
        job,
        pace,
        model,
        job.own_batches(),
        accelerator.device,
        spread,
        optimizers=optimizers,
        backward=accelerator.backward,
    )
    accelerator.end_training()


def why_not(job: Job) -> str:
    """Also where it is not installed."""
    return why_no_processes(job) or ("" if find_spec("accelerate") else "it is not installed")


PEER = Peer(train, why_not, is_many=True)
