"""All processes begin with one module, and its buffers become one again where somebody looks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from oracle import BATCH, QUIET, Classifier, assert_equal_trees, samples
from several_processes import run_in_processes
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_dp
from lightning_dp import DataParallelStrategy


class Normed(Classifier):
    """Its batch norm has buffers, and so have a queue that steps read, and a table of constants."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(10)
        self.register_buffer("queue", torch.zeros(10))
        self.register_buffer("table", torch.arange(10.0))
        self.register_buffer("none", None)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = self.loss((self.norm(x) + self.queue * 0.1 + self.table, y))
        self.queue.mul_(0.5).add_(x.detach().mean(0))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss((self.norm(batch[0]), batch[1]))


class Looks(Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def look(self, trainer: Any, module: Any, *args: Any) -> None:
        self.seen.append({name: b.clone() for name, b in module.named_buffers()})

    on_validation_batch_end = on_train_end = on_train_epoch_start = look


def fitted(buffers: str, devices: int, strategy: bool, rank_seeds: bool) -> Any:
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    found = []
    for seed in (0, 1):  # in the second fit processes differ from the beginning
        torch.manual_seed(seed + rank * rank_seeds)
        module = Normed()
        own = DataParallelStrategy(buffers=buffers) if strategy else "auto"  # type: ignore[arg-type]  # a name
        looks = Looks()
        options: Any = {"accelerator": "cpu", "devices": devices, "strategy": own}
        trainer = Trainer(**QUIET, **options, max_epochs=2, callbacks=[looks])
        own_data = DataLoader(samples(58), batch_size=BATCH)
        trainer.fit(module, own_data, DataLoader(samples(9), batch_size=BATCH))
        found.append((looks.seen, dict(module.state_dict())))
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:A step leaves buffers different")
def test_buffers_of_the_first_process_in_all() -> None:
    """Those of a step are read by the next one: the parameters are one process's only if alike."""
    one = fitted("first", 2, True, False)
    first, second = run_in_processes(fitted, 2, "first", 2, True, True)
    for own in (first, second):
        assert_equal_trees(own, first, "as the first", atol=0.0)
        assert_equal_trees(own, one, "as in one process", atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("counts", [(2, 1), (3, 1)])
def test_means_of_all(counts: tuple[int, int]) -> None:
    processes, k = counts
    one = fitted("mean", processes * k, True, False)
    for own in run_in_processes(fitted, processes, "mean", processes * k, True, True):
        assert_equal_trees(own, one, "as in one process", atol=1e-5)


class Other(Classifier):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.last = nn.Linear(3, width)


def other() -> str:
    trainer = Trainer(**QUIET, accelerator="cpu", devices=2, strategy="dp_custom", max_epochs=1)
    trainer.strategy.setup_environment()
    module: Tensor | Any = Other(3 + trainer.global_rank)
    try:
        trainer.fit(module, DataLoader(samples(9), batch_size=3))
    except ValueError as error:
        return str(error)
    return lightning_dp.__name__


def test_other_modules_are_refused_in_every_process() -> None:
    for said in run_in_processes(other, 2):
        assert "('last.weight', (4, 3), torch.float32) in process 1" in said
        assert "('last.weight', (3, 3), torch.float32) in process 0" in said
