"""Slices: all processes together load every batch of the DataLoader, each its own samples."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.processes import run_in_processes
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
)

from lightning_dp.parallel.processes import World
from lightning_dp.parallel.split import even
from lightning_dp.processes.slices import RankLoader, open_slices

SAMPLES, BATCH = 23, 5


class Numbers(Dataset[Tensor]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: Any) -> Tensor:
        return torch.as_tensor(i)


class ByDraws:
    """Draws from torch's global generator for every batch."""

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(4):
            yield torch.randint(SAMPLES, (3,)).tolist()


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(SAMPLES))


class Regrouped(DataLoader[Any]):
    def __iter__(self) -> Any:
        return super().__iter__()


def loaders(workers: bool) -> dict[str, DataLoader[Any]]:
    data, weights = Numbers(), [1.0] * SAMPLES
    sampler = RandomSampler(data, generator=torch.Generator().manual_seed(3))
    found: dict[str, DataLoader[Any]] = {
        "in order": DataLoader(data, batch_size=BATCH),
        "shuffled": DataLoader(data, batch_size=BATCH, shuffle=True),
        "drop_last": DataLoader(data, batch_size=BATCH, shuffle=True, drop_last=True),
        "own generator": DataLoader(data, batch_size=BATCH, sampler=sampler),
        "weighted": DataLoader(data, BATCH, sampler=WeightedRandomSampler(weights, 17)),
        "drawn at every batch": DataLoader(data, batch_sampler=ByDraws()),
        "lists from a sampler": DataLoader(
            data, batch_size=None, sampler=BatchSampler(RandomSampler(data), BATCH, False)
        ),
    }
    if workers:  # which take long to start
        options: dict[str, Any] = {"num_workers": 2, "persistent_workers": True}
        found["workers"] = DataLoader(data, BATCH, shuffle=True, **options)
    return found


REFUSED: dict[str, Any] = {
    "got Stream": lambda: DataLoader(Stream(), batch_size=BATCH),
    "got list": lambda: [torch.zeros(2)],
    "got Regrouped": lambda: Regrouped(Numbers(), batch_size=BATCH),
    "DistributedSampler, which shares": lambda: DataLoader(
        Numbers(), BATCH, sampler=DistributedSampler(Numbers(), num_replicas=2, rank=0)
    ),
}


def epochs(loader: Any) -> list[list[Any]]:
    return [[opened(part) for part in loader] for _ in range(2)]


def opened(part: Any) -> tuple[list[int], bool]:
    batch, is_empty = open_slices(part)
    return batch.tolist(), is_empty


def world() -> World:
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    return World(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


def loaded(workers: bool) -> dict[str, Any]:
    """Both epochs of every loader, by this rank; and what it refuses."""
    everyone = world()
    torch.manual_seed(everyone.rank)
    found: dict[str, Any] = {}
    for name, loader in loaders(workers).items():
        sliced = RankLoader(loader, lambda n: even(n, everyone.size), everyone)
        assert len(sliced) == len(loader) and sliced.dataset is loader.dataset
        found[name] = epochs(RankLoader(sliced, lambda n: even(n, everyone.size), everyone))
    for name, make in REFUSED.items():
        with pytest.raises((TypeError, ValueError), match=name):
            RankLoader(make(), lambda n: even(n, everyone.size), everyone)
    single = DataLoader(Numbers(), batch_size=None)
    with pytest.raises(ValueError, match="Give it a batch_size"):
        next(iter(RankLoader(single, lambda n: even(n, everyone.size), everyone)))
    lengths = DataLoader(Numbers(), batch_size=BATCH + everyone.rank * SAMPLES)
    with pytest.raises(ValueError, match=r"as many batches in every process, got 5, 1"):
        RankLoader(lengths, lambda n: even(n, everyone.size), everyone)
    return found


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_all_ranks_together_load_what_one_process_loads(count: int) -> None:
    torch.manual_seed(0)
    workers = count > 2
    ranks = run_in_processes(loaded, count, workers)
    for name, loader in loaders(workers).items():
        for epoch, batches in enumerate(epochs(loader)):
            for k, (expected, _) in enumerate(batches):
                slices = [rank[name][epoch][k] for rank in ranks]
                together = [i for own, is_empty in slices if not is_empty for i in own]
                assert together == expected, (name, epoch, k)
                for own, is_empty in slices:
                    assert own and (not is_empty or len(expected) < count)
