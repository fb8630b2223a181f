"""Hooks in several processes: what is each one's own, and collectives, which steps refuse."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch
from support.oracle import Classifier, assert_equal_trees, loader, trainer
from support.processes import run_in_processes
from torch import Tensor
from torchmetrics import MeanMetric, SumMetric

from lightning_dp import DataParallelStrategy

DEVICES, SAMPLES = 4, 51  # the last batch has one sample: the second process has none of it


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
        with pytest.raises(RuntimeError, match="0 is at all_gather, process 1 is at reduce"):
            strategy.reduce(own) if rank else strategy.all_gather(own)


class AsksInStep(Classifier):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.all_gather(batch[0])


def asked() -> dict[str, Any]:
    def validate(module: Classifier) -> None:
        job = trainer(DEVICES, DataParallelStrategy(check_first_step=False))
        job.validate(module, loader(SAMPLES), verbose=False)

    with pytest.raises(RuntimeError, match="Expected no all_gather in a step of several processes"):
        validate(AsksInStep())
    module = Asks()
    validate(module)
    return module.noted


def test_collectives_in_hooks() -> None:
    expected = {
        **{f"batch {i}": x for i, (x, _) in enumerate(loader(SAMPLES))},
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


class Keeps(Classifier):
    """Keeps what its steps have; logs and measures in steps and in hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.items: list[Tensor] = []
        self.rows: list[Tensor] = []
        self.losses: list[Tensor] = []
        self.seen = 0.0
        self.in_hook, self.in_step = SumMetric(), MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.items.append(batch[0][:, 0])
        self.in_step.update(batch[0].mean())
        return {"loss": self.loss(batch), "rows": batch[0][:, 0]}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].clone())
        self.rows.append(outputs["rows"])
        if batch_idx < 2:  # of the last one the second process has nothing
            self.seen = self.seen + batch[0].sum().item()
            self.in_hook.update(batch[0].sum())

    def on_train_epoch_end(self) -> None:
        self.log("own", self.seen)
        self.log("of all", self.seen, sync_dist=True, reduce_fx="sum")
        self.log("in hook", self.in_hook)
        self.log("in step", self.in_step)


def kept(devices: int) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(int(os.environ.get("RANK", 0)))  # all begin with the first one's weights
    module, job = Keeps(), trainer(devices, max_epochs=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that "own" is not synced
        job.fit(module, loader(SAMPLES))
    logged = {name: value.clone() for name, value in job.callback_metrics.items()}
    own = {name: getattr(module, name) for name in ("items", "rows", "losses")}
    return {**own, **logged, "predicted": job.predict(module, loader(SAMPLES))}


def test_items_and_rows_are_each_processs_own_and_losses_and_metrics_alike() -> None:
    expected, several = kept(1), run_in_processes(kept, 2, DEVICES)
    first, second = several
    for name in ("items", "rows", "predicted"):
        for i, rows in enumerate(expected[name]):
            parts = [own[name][i] for own in several if i < len(own[name])]
            assert_equal_trees(torch.cat(parts), rows, f"{name}[{i}]", atol=1e-10, rtol=0)
    assert len(second["items"]) == 2 and not len(second["rows"][2])
    assert_equal_trees(first["own"] + second["own"], expected["own"], "own", atol=1e-10, rtol=0)
    for own in several:
        for name in ("losses", "of all", "in hook", "in step"):
            assert_equal_trees(own[name], expected[name], name, atol=1e-10, rtol=0)
