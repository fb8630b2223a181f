"""Collectives in hooks act over the processes; in steps they are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import oracle
from support.oracle import Classifier, samples
from support.processes import run_in_processes
from torch.utils.data import DataLoader, Subset

from lightning_dp import DataParallelStrategy
from lightning_dp.parallel.processes import ProcessesApartError


def six() -> DataLoader[Any]:
    """A batch of five samples, and one of one sample, of which the second process has nothing."""
    return DataLoader(Subset(samples(), range(6)), batch_size=5)


class Asks(Classifier):
    """Notes what collectives give in hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: dict[str, Any] = {}

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.noted[f"batch {batch_idx}"] = self.all_gather(batch[0])

    def on_validation_epoch_end(self) -> None:
        strategy: Any = self.trainer.strategy
        rank = self.global_rank
        own = torch.full((1 + rank, 2), float(rank))
        self.noted |= {
            "gather": self.all_gather({"rows": own, "number": own.mean()}),
            "mean": strategy.reduce(torch.tensor(float(rank))),
            "sum": strategy.reduce(torch.tensor([rank]), reduce_op="sum"),
            "max": strategy.reduce(torch.tensor([rank]), reduce_op="max"),
            "broadcast": strategy.broadcast({"rank": rank}, 1),
            "any": strategy.reduce_boolean_decision(rank == 1, all=False),
            "all": strategy.reduce_boolean_decision(rank == 1),
        }
        strategy.barrier("in a hook")
        with pytest.raises(ProcessesApartError, match="0 is at all_gather, process 1 is at reduce"):
            strategy.reduce(own) if rank else strategy.all_gather(own)


class AsksInStep(Classifier):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.all_gather(batch[0])


def asked() -> dict[str, Any]:
    def validate(module: Classifier) -> None:
        job = oracle.trainer(4, DataParallelStrategy(check_first_step=False))
        job.validate(module, six(), verbose=False)

    with pytest.raises(RuntimeError, match="Expected no all_gather in a step of several processes"):
        validate(AsksInStep())
    module = Asks()
    validate(module)
    return module.noted


def test_collectives_in_hooks() -> None:
    x = samples()[:6][0]
    expected = {
        "batch 0": x[:5],
        "batch 1": x[5:],
        "gather": {"rows": torch.tensor([[0.0, 0], [1, 1], [1, 1]]), "number": torch.tensor(0.5)},
        "mean": torch.tensor(0.5),
        "sum": torch.tensor([1]),
        "max": torch.tensor([1]),
        "broadcast": {"rank": 1},
        "any": True,
        "all": False,
    }
    for noted in run_in_processes(asked, 2):
        torch.testing.assert_close(noted, expected)
