"""Ranks: which devices and options each process has, and that all processes begin alike."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch import LightningModule, Trainer
from support.oracle import QUIET, Classifier, loader
from support.processes import run_in_processes
from torch import nn

from lightning_dp import DataParallelStrategy
from lightning_dp.parallel.split import even
from lightning_dp.processes import rank_sizes
from lightning_dp.processes.ranks import _agreed_sizes

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


def test_a_slurm_job_without_tasks_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    strategy = DataParallelStrategy(cluster_environment=SLURMEnvironment())
    own = started(monkeypatch, {}, strategy=strategy, num_nodes=1)
    assert (own.global_rank, own.world_size, len(own.parallel_devices)) == (0, 1, 5)


@pytest.mark.parametrize(
    ("environ", "options", "error"),
    [
        (
            TORCHRUN,
            {"num_nodes": 1},
            "num_nodes: expected the number of machines.* 4 processes .* got 1",
        ),
        (
            SLURM,
            {"num_nodes": 4},
            "num_nodes: expected the number of machines.* 4 processes .* got 4",
        ),
        (TORCHRUN, {"devices": 1}, "devices: expected at least 2, .* got 1"),
        ({}, {}, "num_nodes: expected 1, .* got 2"),
    ],
)
def test_wrong_numbers_are_refused(
    environ: Any, options: Any, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=error):
        started(monkeypatch, environ, **options)


@given(st.integers(0, 99), st.lists(st.integers(1, 4), min_size=1, max_size=4), st.randoms())
def test_slices_are_what_the_devices_would_get(n: int, counts: list[int], random: Any) -> None:
    weights = [random.choice([0, 1, 3]) for _ in range(sum(counts))]
    for given_weights in (None, weights if any(weights) else None):
        sizes = rank_sizes(n, counts, given_weights)
        assert len(sizes) == len(counts) and sum(sizes) == n
    assert rank_sizes(n, [1] * len(counts)) == even(n, len(counts))


@pytest.mark.parametrize(
    "shares",
    [
        [(1, None, "even"), (1, None, "chunk")],
        [(1, (1,), "even"), (1, None, "even")],
        [(1, (0,), "even"), (1, (0,), "even")],
    ],
)
def test_shares_that_do_not_fit_are_refused(shares: Any) -> None:
    with pytest.raises(ValueError, match="weights: expected"):
        _agreed_sizes(shares)


class Wider(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(10, 3)


class ByHand(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def refused(module: type[LightningModule], own: Mapping[str, Any], **options: Any) -> str:
    """What a fit is refused with, in which one process has other options."""
    torch.manual_seed(0)
    strategy = DataParallelStrategy(**own)
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=strategy, **{"max_epochs": 1, **QUIET, **options}
    )
    try:
        trainer.fit(module(), loader(10))
    except (ValueError, TypeError) as error:
        return str(error)
    return "nothing"


def unequal() -> list[str]:
    first = os.environ["RANK"] == "0"
    return [
        refused(Classifier, {"buffers": "mean" if first else "first"}),
        refused(Classifier, {}, max_epochs=1 if first else 2),
        refused(Classifier, {}, gradient_clip_val=0.5 if first else None),
        refused(Classifier if first else Wider, {}),
        refused(Classifier, {"split": "even" if first else "chunk"}),
        refused(Classifier, {"mode": "forward"}),
        refused(Classifier, {}, sync_batchnorm=True),
        refused(ByHand, {}),
    ]


def test_options_and_modules_that_differ_are_refused_in_every_process() -> None:
    expected = [
        "buffers: expected the same in all processes, got 'mean' in process 0 and 'first' in "
        "process 1",
        "Trainer's max_epochs: .* got 1 in process 0 and 2 in process 1",
        "Trainer's gradient_clip_val: .* got 0.5 in process 0 and None in process 1",
        "Expected the same parameters and buffers in every process",
        "split",
        "mode: expected step mode in several processes, got forward mode. Use step mode",
        "sync_batchnorm: expected False in several processes",
        "got forward mode, as it sets automatic_optimization = False",
    ]
    for errors in run_in_processes(unequal, 2):
        for error, pattern in zip(errors, expected, strict=True):
            assert re.search(pattern, error), error
