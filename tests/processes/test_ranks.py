"""Ranks: which devices each process has, and that all begin with the same options and module."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder
from support.oracle import QUIET, ByHand, Classifier, loader
from support.processes import run_in_processes
from torch import nn

from lightning_dp import DataParallelStrategy

TORCHRUN = {"RANK": 3, "LOCAL_RANK": 1, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 1}
TORCHRUN |= {"MASTER_ADDR": "localhost", "MASTER_PORT": 1, "TORCHELASTIC_RUN_ID": "x"}
SLURM = {"SLURM_NTASKS": 4, "SLURM_NNODES": 2, "SLURM_NTASKS_PER_NODE": 2, "SLURM_PROCID": 3}
SLURM |= {"SLURM_LOCALID": 1, "SLURM_NODEID": 1, "SLURM_JOB_NAME": "x", "SLURM_JOB_ID": 7}


def started(monkeypatch: pytest.MonkeyPatch, environ: Mapping[str, Any], **options: Any) -> Any:
    """The strategy of a Trainer in a process with these variables."""
    for name, value in environ.items():
        monkeypatch.setenv(name, str(value))
    own = {"num_nodes": 2, "devices": 5, "strategy": DataParallelStrategy(), **options}
    return Trainer(accelerator="cpu", **QUIET, **own).strategy


@pytest.mark.parametrize("environ", [TORCHRUN, SLURM], ids=["torchrun", "slurm"])
def test_a_machines_devices_are_shared_out(environ: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own = started(monkeypatch, environ)
    assert (own.global_rank, own.local_rank, own.node_rank, own.world_size) == (3, 1, 1, 4)
    assert own.replica_names == ("process3/cpu:0", "process3/cpu:1")


@pytest.mark.parametrize(
    ("environ", "options", "error"),
    [
        (TORCHRUN, {"num_nodes": 1}, "num_nodes: expected the number .* 4 processes on, got 1"),
        (SLURM, {"num_nodes": 4}, "num_nodes: expected the number .* 4 processes on, got 4"),
        (TORCHRUN, {"devices": 1}, "devices: expected at least 2, .* got .device"),
        ({}, {}, "num_nodes: expected the number .* 1 processes on, got 2"),
        (
            TORCHRUN,
            {"strategy": DataParallelStrategy(devices=["cpu"] * 4, weights=[1, 2, 0, 0])},
            "weights: expected a list of finite numbers .* not all 0",
        ),
    ],
)
def test_wrong_numbers_are_refused(
    environ: Any, options: Any, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=error):
        started(monkeypatch, environ, **options)


class Wider(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(10, 3)


class Limited(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(3, 2, max_norm=1.0)


class Sparse(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(3, 10, sparse=True)

    def forward(self, x: Any) -> Any:
        return self.net(x + self.words(x[:, 0].long() % 3))


class Manual(ByHand, Classifier):
    pass


def refused(module: type[LightningModule], own: Mapping[str, Any], **options: Any) -> str:
    """What a fit is refused with."""
    torch.manual_seed(0)
    strategy = DataParallelStrategy(**own)
    options = {"max_epochs": 1, **QUIET, **options}
    try:
        trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, **options)
        trainer.fit(module(), loader(10))
    except Exception as error:
        return str(error)
    return "nothing"


def all_refused() -> list[str]:
    """Some options are other ones in the first process."""
    first = os.environ["RANK"] == "0"
    return [
        refused(Classifier, {"buffers": "mean" if first else "first"}),
        refused(Classifier, {"split": "even" if first else "chunk"}),
        refused(Classifier if first else Wider, {}),
        refused(Classifier, {"mode": "forward"}),
        refused(Manual, {}),
        refused(Classifier, {}, sync_batchnorm=True),
        refused(Limited, {}),
        refused(Sparse, {}),
        refused(Classifier, {}, callbacks=[BatchSizeFinder()]),
    ]


REFUSALS = [
    "expected the same options in all processes, got .*buffers='mean'.*buffers='first'",
    "expected the same options in all processes, got .*split='even'.*split='chunk'",
    "Expected the same parameters and buffers in every process",
    "mode: expected step mode in several processes, got forward mode. Leave it out",
    "got forward mode, as it sets automatic_optimization = False",
    "sync_batchnorm: expected False in several processes",
    "max_norm: expected None on several devices, got 1.0",
    r"Expected dense gradients .* shape \(3, 10\)",
    "Batch size finder is not supported with distributed strategies",
]


def test_what_differs_or_cannot_be_is_refused_in_every_process() -> None:
    for errors in run_in_processes(all_refused, 2):
        for error, pattern in zip(errors, REFUSALS, strict=True):
            assert re.search(pattern, error), error
