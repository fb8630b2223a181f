"""A process of a contestant: `python -m benchmarks.contestant JOB`, started by `contest`.

Commands come on the standard input and answers leave on the standard output; what others print
goes to the standard error.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings

import torch
from benchmarks.job import Job
from benchmarks.pace import Pace
from benchmarks.peers import PEERS


def main() -> None:
    """Trains until there are no more commands."""
    job = Job.from_json(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    quieten()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: job.cores])
    if job.device == "sim":
        _simulate(job)
    torch.manual_seed(0)
    PEERS[job.peer].train(job, Pace(job, sys.stdin, answers))


def quieten() -> None:
    """Nobody hears warnings and hints."""
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning_dp"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _simulate(job: Job) -> None:
    import sim_devices

    sim_devices.enable(max(8, job.devices))
    if job.virtual:
        for k in range(torch.sim.device_count()):
            torch.sim.set_speed(k, flops_per_second=job.flops)
        torch.sim.set_links(job.links)


if __name__ == "__main__":
    main()
