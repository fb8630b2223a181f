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
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
)

from lightning_dp.parallel.processes import World
from lightning_dp.parallel.split import even
from lightning_dp.processes import RankLoader, open_slices

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
        "drop_last": DataLoader(data, batch_size=BATCH, shuffle=True, drop_last=True),
        "own generator": DataLoader(data, batch_size=BATCH, sampler=sampler),
        "weighted": DataLoader(data, BATCH, sampler=WeightedRandomSampler(weights, 17)),
        "drawn at every batch": DataLoader(data, batch_sampler=ByDraws()),
    }
    if workers:  # which take long to start
        options: dict[str, Any] = {"num_workers": 2, "persistent_workers": True}
        found["workers"] = DataLoader(data, BATCH, shuffle=True, **options)
    return found


REFUSED: dict[str, Any] = {
    "got DataLoader, Stream": lambda _: DataLoader(Stream(), batch_size=BATCH),
    "got list": lambda _: [torch.zeros(2)],
    "got Regrouped": lambda _: Regrouped(Numbers(), batch_size=BATCH),
    "got DataLoader, Numbers": lambda _: DataLoader(Numbers(), batch_size=None),
    "got DataLoader, Numbers, DistributedSampler": lambda _: DataLoader(
        Numbers(), BATCH, sampler=DistributedSampler(Numbers(), num_replicas=2, rank=0)
    ),
}


def epochs(loader: Any) -> list[list[Any]]:
    return [[opened(part) for part in loader] for _ in range(2)]


def opened(part: Any) -> tuple[list[int], bool]:
    batch, is_empty = open_slices(part)
    return batch.tolist(), is_empty


def loaded(workers: bool) -> dict[str, Any]:
    """Both epochs of every loader, by this rank; and what it refuses."""
    torch.distributed.init_process_group("gloo")
    everyone = World(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    torch.manual_seed(everyone.rank)

    def sliced(loader: Any) -> RankLoader:
        return RankLoader(loader, lambda n: even(n, everyone.size), everyone)

    for name, make in REFUSED.items():
        with pytest.raises((TypeError, ValueError), match=name):
            sliced(make(everyone.rank))
    own = {name: (loader, sliced(loader)) for name, loader in loaders(workers).items()}
    assert all(len(s) == len(x) and s.dataset is x.dataset for x, s in own.values())
    return {name: epochs(sliced(part)) for name, (_, part) in own.items()}


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
