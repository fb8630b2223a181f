"""Ours in several processes, each of which has a part of the devices and of every batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from benchmarks.job import Job
from benchmarks.pace import Pace
from benchmarks.peers.peer import Peer, why_no_processes
from benchmarks.peers.trainer import fit
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from torch.utils.data import DataLoader, Dataset

import lightning_dp

FOREVER = 10**6
"""Batches."""


class Rows(Dataset[Any]):
    """The rows of some batches, one after another, again and again. Those of a list come at once.

    So a process loads the rows of its slice, and nothing is put together row by row.
    """

    def __init__(self, batches: Sequence[Any]) -> None:
        self._batches = batches
        self.samples = _length(batches[0])

    def __len__(self) -> int:
        return FOREVER * self.samples

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """What is loaded of a batch."""
        number, first = divmod(indices[0], self.samples)
        batch = self._batches[number % len(self._batches)]
        return _rows(batch, slice(first, first + len(indices)))


def _length(batch: Any) -> int:
    values = list(batch.values()) if isinstance(batch, dict) else batch
    return len(values[0])


def _rows(batch: Any, rows: slice) -> Any:
    if isinstance(batch, dict):
        return {key: value[rows] for key, value in batch.items()}
    return tuple(value[rows] for value in batch)


def _as_is(batch: Any) -> Any:
    return batch


def train(job: Job, pace: Pace) -> None:
    """By the strategy, in processes that somebody else has started, as torchrun does."""
    rows = Rows(job.batches())
    own = job.torch_devices[: job.devices // job.processes]
    strategy: Any = lightning_dp.DataParallelStrategy(**job.strategy_options)
    fit(
        job,
        pace,
        DataLoader(rows, batch_size=rows.samples, collate_fn=_as_is),
        own,
        devices=job.devices,
        strategy=strategy,
        plugins=[TorchElasticEnvironment()],
    )
    torch.distributed.destroy_process_group()


def why_not(job: Job) -> str:
    """It is for several processes."""
    return why_no_processes(job) if job.processes > 1 else "it is for several processes"


PEER = Peer(train, why_not)
