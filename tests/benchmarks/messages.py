"""What messages between processes of this machine take: as a link, for the forecast."""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from several_processes import run_in_processes

from lightning_dp.forecast import Link

SMALL, LARGE, ROUNDS = 256, 2**23, 30
"""Bytes of two messages, and how often they are sent."""


def measured_link(processes: int) -> Link:
    """The link with which a ring of so many processes takes as long as sums over gloo do here.

    Each of a ring's `2 (P - 1)` exchanges takes `seconds + bytes / P / bytes_per_second`.
    """
    small, large = run_in_processes(_medians, processes)[0]
    exchanges = 2 * (processes - 1)
    rate = exchanges * (LARGE - SMALL) / processes / max(large - small, 1e-9)
    return Link(rate, small / exchanges)


def _medians() -> list[float]:
    """Seconds of a sum of each size, in one of the processes."""
    dist.init_process_group("gloo")
    found = []
    for size in (SMALL, LARGE):
        numbers = torch.zeros(size // 4)
        times = []
        for _ in range(ROUNDS):
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(numbers)
            times.append(time.perf_counter() - start)
        found.append(statistics.median(times[ROUNDS // 3 :]))
    return found
