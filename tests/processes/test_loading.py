"""Trainers in several processes: which samples each step sees, whatever the loaders are."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from oracle import Classifier
from several_processes import run_in_processes
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler
from worlds import flat

import lightning_dp


class Numbered(Dataset[Any]):
    """Inputs, targets, and the numbers of the samples."""

    def __init__(self, n: int, first: int = 0) -> None:
        generator = torch.Generator().manual_seed(first)
        self.x = torch.randn(n, 10, generator=generator, dtype=torch.float64)
        self.y = torch.randint(3, (n,), generator=generator)
        self.first = first

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        return self.x[i], self.y[i], self.first + i


class Model(Classifier):
    def loss(self, batch: Any) -> Tensor:
        if isinstance(batch, dict):
            return sum(self.loss(own) for own in batch.values() if own is not None)
        return super().loss(batch[:2])

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.log("val/loss", self.loss(batch))


class Dropping(Model):
    def __init__(self) -> None:
        super().__init__()
        self.net.append(nn.Dropout(0.5))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch[2][0] % 2:
            torch.rand(3)
        return super().training_step(batch, batch_idx)


class Iterating(Model):
    def training_step(self, dataloader_iter: Any) -> Any:
        batch, *_ = next(dataloader_iter)
        return self.loss(batch)

    def validation_step(self, dataloader_iter: Any) -> Any:
        batch, *_ = next(dataloader_iter)
        self.log("val/loss", self.loss(batch), batch_size=len(batch[0]))


class Stream(IterableDataset[Any]):
    """Every process's share has another length."""

    def __init__(self, rows: Numbered, numbers: Any = None) -> None:
        self.rows = rows
        self.numbers = range(len(rows)) if numbers is None else numbers

    def shard(self, num_shards: int, index: int) -> Stream:
        first, *others = self.numbers[::3], *(self.numbers[i::3] for i in (1, 2))
        parts = [first, sorted([*others[0], *others[1]])] if num_shards == 2 else [first, *others]
        return Stream(self.rows, parts[index])

    def __iter__(self) -> Iterator[Any]:
        return (self.rows[i] for i in self.numbers)


class Numbers(Callback):
    """The numbers of the samples that this process has had, batch for batch."""

    def __init__(self) -> None:
        self.seen: dict[str, list[list[list[int]]]] = {"train": [], "val": []}

    def on_train_epoch_start(self, *args: Any) -> None:
        self.seen["train"].append([])

    def on_validation_epoch_start(self, *args: Any) -> None:
        self.seen["val"].append([])

    def note(self, stage: str, trainer: Trainer, batch: Any) -> None:
        world = getattr(trainer.strategy, "world", None)
        batch = [batch] if isinstance(batch, list) else [b for b in batch.values() if b is not None]
        numbers = [n for own in batch for n in own[2].tolist()]
        self.seen[stage][-1].append([] if world is not None and world.is_idle else numbers)

    def on_train_batch_end(self, trainer: Any, module: Any, out: Any, batch: Any, i: int) -> None:
        self.note("train", trainer, batch)

    def on_validation_batch_end(
        self, trainer: Any, module: Any, out: Any, batch: Any, i: int, dataloader_idx: int = 0
    ) -> None:
        self.note("val", trainer, batch)


def combined(mode: Any) -> CombinedLoader:
    loaders = {
        "a": DataLoader(Numbered(20), batch_size=5, shuffle=True),
        "b": DataLoader(Numbered(10, 100), batch_size=5, shuffle=True),
    }
    return CombinedLoader(loaders, mode)


def of_kind(kind: str) -> dict[str, Any]:
    """A module, loaders and options of a Trainer."""
    shuffled = DataLoader(Numbered(21), batch_size=5, shuffle=True)  # the last batch is of one
    plain = DataLoader(Numbered(11, 50), batch_size=5)
    case: dict[str, Any] = {"module": Model, "train": shuffled, "val": plain}
    if kind == "dropout":
        case["module"] = Dropping
    elif kind == "dataloader_iter":
        case["module"] = Iterating
    elif kind.startswith("combined"):
        case["train"] = combined(kind.partition(" ")[2])
        case["val"] = [plain, DataLoader(Numbered(6, 80), batch_size=4)]
    elif kind == "limits":
        case |= {"limit_train_batches": 3, "limit_val_batches": 0.5, "val_check_interval": 2}
        case["reload_dataloaders_every_n_epochs"] = 1
    elif kind == "overfit":
        case["overfit_batches"] = 2
    elif kind == "fast_dev_run":
        case["fast_dev_run"] = 3
    elif kind == "workers":
        rows = Numbered(21)
        sampler = BatchSampler(RandomSampler(rows), 5, False)
        case["train"] = DataLoader(
            rows, batch_sampler=sampler, num_workers=2, persistent_workers=True
        )
    elif kind == "stream":
        case["train"] = DataLoader(Stream(Numbered(20)), batch_size=6)
    return case


def fitted(kinds: list[str], devices: int) -> dict[str, Any]:
    """For each kind the parameters and the numbers of the samples."""
    warnings.simplefilter("ignore")
    results = {}
    for kind in kinds:
        seed_everything(1, verbose=False)
        case = of_kind(kind)
        module: LightningModule = case.pop("module")().double()
        loaders = case.pop("train"), case.pop("val")
        numbers = Numbers()
        strategy: Any = lightning_dp.DataParallelStrategy() if devices else "auto"
        trainer = Trainer(
            accelerator="cpu",
            devices=devices or 1,
            strategy=strategy,
            max_epochs=2,
            num_sanity_val_steps=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[numbers],
            **case,
        )
        trainer.fit(module, *loaders)
        parameters = {name: p.detach().clone() for name, p in module.named_parameters()}
        results[kind] = parameters, numbers.seen
    return results


@cache
def on_one_device(kind: str) -> Any:
    return fitted([kind], 0)[kind]


def check(kinds: list[str], processes: int, devices: int) -> None:
    results = run_in_processes(fitted, processes, kinds, devices)
    for kind in kinds:
        expected, numbers = on_one_device(kind)
        seen = [result[kind][1] for result in results]
        for stage in ("train", "val"):
            joined = [
                [flat(parts) for parts in zip(*epochs, strict=True)]
                for epochs in zip(*(own[stage] for own in seen), strict=True)
            ]
            if kind.startswith("combined") and stage == "train":  # each loader's are cut
                joined, own = _sorted(joined), _sorted(numbers[stage])
                assert joined == own, (kind, stage)
            elif kind == "dropout" and stage == "train":
                assert _sorted([[flat(epoch)] for epoch in joined]) == [[list(range(21))]] * 2
                assert joined[0] == numbers[stage][0] and joined[0] != joined[1]
            else:
                assert joined == numbers[stage], (kind, stage)
        if kind != "dropout":
            for result in results:
                torch.testing.assert_close(result[kind][0], expected, rtol=0, atol=1e-10)


def _sorted(epochs: Any) -> Any:
    return [[sorted(batch) for batch in epoch] for epoch in epochs]


QUICK = ["dropout", "dataloader_iter", "combined max_size_cycle"]
SLOW = ["limits", "overfit", "fast_dev_run", "workers", "combined min_size", "combined max_size"]


def test_each_sample_is_seen_once_in_the_order_of_one_device() -> None:
    check(QUICK, 2, 2)


@pytest.mark.slow
@pytest.mark.parametrize("processes, devices", [(2, 4), (3, 3)])
def test_more_kinds_of_loaders_and_more_processes(processes: int, devices: int) -> None:
    check([*QUICK, *SLOW], processes, devices)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3])
def test_shares_of_a_stream_are_seen_once_by_processes_that_stay_alike(processes: int) -> None:
    results = [own["stream"] for own in run_in_processes(fitted, processes, ["stream"], processes)]
    for parameters, seen in results:
        torch.testing.assert_close(parameters, results[0][0], rtol=0, atol=0)
        assert [len(epoch) for epoch in seen["train"]] == [len(results[0][1]["train"][0])] * 2
    for epoch in range(2):
        numbers = flat(flat(seen["train"][epoch]) for _, seen in results)
        assert sorted(numbers) == list(range(20))
