"""A long run of several processes leaves no growing memory, files or threads in any of them."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from long_runs import Busy, Count, check_flat
from oracle import QUIET, loader
from several_processes import run_in_processes

from lightning_dp import DataParallelStrategy

pytestmark = pytest.mark.slow

STEPS, PER_EPOCH = 1_000, 25


def soaked(devices: int, mode: Any) -> tuple[int, list[dict[str, int]], dict[str, int]]:
    """The steps, the counts of every epoch, and by how much files and threads grew in the fit."""
    count = Count([torch.device("cpu")], of_process=True)
    trainer = Trainer(
        **QUIET,
        accelerator="cpu",
        devices=devices,
        strategy=DataParallelStrategy(mode=mode, executor="threads"),
        max_epochs=STEPS // PER_EPOCH,
        log_every_n_steps=1,
        callbacks=[count],
    )
    # 149 samples in batches of 6: the last batch has 5, so shards are uneven.
    train, val = loader(n=PER_EPOCH * 6 - 1, batch_size=6), loader(n=19, batch_size=10)
    trainer.fit(Busy(), train, val)
    left = {"threads": threading.active_count(), "open files": len(os.listdir("/proc/self/fd"))}
    return trainer.global_step, count.counts, left


@pytest.mark.parametrize(("devices", "mode"), [(4, "step"), (4, "forward")])
def test_1000_steps_of_two_processes_leave_nothing_behind(devices: int, mode: str) -> None:
    for steps, counts, left in run_in_processes(soaked, 2, devices, mode, seconds=600):
        assert steps == STEPS
        check_flat(counts)
        assert left["threads"] <= counts[0]["threads"]
        assert left["open files"] <= counts[0]["open files"]
