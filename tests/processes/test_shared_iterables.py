"""Iterables: each process reads its share, and none waits for batches that another one lacks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from worlds import flat, together

from lightning_dp.parallel.processes import World
from lightning_dp.parallel.split import between_processes
from lightning_dp.processes.loaders import of_process
from lightning_dp.processes.slices import Slice


class Numbers(IterableDataset[Tensor]):
    """Numbers; a process's share are those at `index`, `index + num_shards` and so on."""

    def __init__(self, numbers: Any) -> None:
        self.numbers = list(numbers)

    def shard(self, num_shards: int, index: int) -> Numbers:
        part = copy.copy(self)
        part.numbers = self.numbers[index::num_shards]
        return part

    def __iter__(self) -> Iterator[Tensor]:
        worker = get_worker_info()
        start, step = (worker.id, worker.num_workers) if worker else (0, 1)
        yield from map(torch.tensor, self.numbers[start::step])


class Sized(Numbers):
    def __len__(self) -> int:
        return len(self.numbers)


class OfProcess(IterableDataset[Tensor]):
    """Knows by itself what its process reads."""

    is_sharded = True

    def __init__(self, numbers: Any) -> None:
        self.numbers = numbers

    def __iter__(self) -> Iterator[Tensor]:
        yield from map(torch.tensor, self.numbers)


def read(
    world: World, make: Callable[[int], Any], counts: tuple[int, ...] | None = None, epochs: int = 1
) -> Any:
    counts = counts or (1,) * world.size
    loader = of_process(make(world.rank), partial(between_processes, device_counts=counts), world)
    return [[(part.batch.tolist(), part.is_idle) for part in loader] for _ in range(epochs)]


@pytest.mark.parametrize("n", [0, 1, 2, 5, 12, 13])
@pytest.mark.parametrize("counts", [(1, 1), (2, 1), (1, 1, 1)])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("data", [Numbers, Sized])
def test_every_sample_is_read_once(
    n: int, counts: tuple[int, ...], drop_last: bool, data: Any
) -> None:
    def make(_: int) -> DataLoader[Any]:
        return DataLoader(data(range(n)), batch_size=4, drop_last=drop_last)

    results = together(partial(read, make=make, counts=counts, epochs=2), len(counts))
    sizes = between_processes(4, counts)
    for epoch in range(2):
        parts = [result[epoch] for result in results]
        assert len({len(own) for own in parts}) == 1
        seen = []
        for rank, own in enumerate(parts):
            batches = [batch for batch, is_idle in own if not is_idle]
            assert all(len(batch) == sizes[rank] for batch in batches[:-1])
            seen += flat(batches)
        if not drop_last:
            assert sorted(seen) == list(range(n))
        else:
            whole = [len(range(n)[r :: len(counts)]) // s * s for r, s in enumerate(sizes)]
            assert len(seen) == len(set(seen)) == sum(whole)


def test_a_process_without_a_batch_takes_part_with_one_that_counts_for_nothing() -> None:
    def make(rank: int) -> DataLoader[Any]:
        return DataLoader(OfProcess([[1, 2, 3], [4], []][rank]), batch_size=3)

    busy = [([1], False), ([2], False), ([3], False)]
    ended = [([4], False), ([4], True), ([4], True)]
    empty = [([1], True)] * 3
    assert together(partial(read, make=make), 3) == [[busy], [ended], [empty]]


def test_the_length_is_that_of_the_process_that_has_most() -> None:
    def job(world: World) -> Any:
        share = partial(between_processes, device_counts=(1, 1))
        sized = DataLoader(Sized(range(9)), batch_size=4)
        own = of_process(sized, share, world)
        assert vars(sized)["dataset"].numbers == list(range(9)) and isinstance(own.dataset, Sized)
        lists = of_process(Batches([[1], [2], [3]]), share, world)
        unsized = of_process(DataLoader(Numbers(range(9)), batch_size=4), share, world)
        with pytest.raises(TypeError):
            len(unsized)
        again = of_process(own, share, world)
        made_anew = of_process(type(own)(own.dataset, batch_size=4), share, world)
        same = [[part.batch.tolist() for part in each] for each in (own, again, made_anew)]
        assert same[0] == same[1] == same[2]
        return len(own), len(lists), len(again), own.yielded

    # 5 and 4 samples, in batches of 2 each
    assert together(job, 2) == [(3, 2, 3, 3)] * 2


class Batches:
    """An iterable over batches that is no DataLoader."""

    def __init__(self, batches: Any) -> None:
        self.batches, self.name = batches, "mine"

    def shard(self, num_shards: int, index: int) -> Batches:
        return Batches(self.batches[index::num_shards])

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Tensor]:
        return iter([torch.tensor(batch) for batch in self.batches])


@pytest.mark.parametrize(
    "make", [Batches, lambda batches: DataLoader(OfBatches(batches), batch_size=None)]
)
def test_batches_may_be_the_users_own(make: Any) -> None:
    results = together(partial(read, make=lambda _: make([[1, 2], [3, 4, 5], [6]])), 2)
    assert results == [[[([1, 2], False), ([6], False)]], [[([3, 4, 5], False), ([3, 4, 5], True)]]]


class OfBatches(Numbers):
    """Yields whole batches."""


def test_what_an_iterable_of_the_users_has_can_be_asked() -> None:
    def job(world: World) -> Any:
        own = of_process(Batches([[1], [2]]), partial(between_processes, device_counts=(1,)), world)
        again = of_process(own, partial(between_processes, device_counts=(1,)), world)
        return copy.copy(own).name, [part.batch.tolist() for part in again]

    assert together(job, 1) == [("mine", [[1], [2]])]


def test_workers_share_out_what_is_the_processes() -> None:
    def make(_: int) -> DataLoader[Any]:
        return DataLoader(Numbers(range(8)), batch_size=4, num_workers=2)

    [[first], [second]] = together(partial(read, make=make), 2)
    assert sorted(flat(batch for batch, _ in first)) == [0, 2, 4, 6]
    assert sorted(flat(batch for batch, _ in second)) == [1, 3, 5, 7]


class Silent(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        yield torch.tensor(1)


@pytest.mark.parametrize("make", [lambda: DataLoader(Silent()), lambda: [torch.ones(2)]])
def test_an_iterable_that_does_not_say_its_share_is_refused(make: Any) -> None:
    for error in together(partial(read, make=lambda _: make()), 2):
        assert isinstance(error, TypeError)
        assert "method shard(num_shards, index)" in str(error) and "is_sharded" in str(error)


def test_a_batch_size_of_which_a_process_gets_nothing_is_refused() -> None:
    def make(_: int) -> DataLoader[Any]:
        return DataLoader(Numbers(range(9)), batch_size=1)

    for error in together(partial(read, make=make), 2):
        assert isinstance(error, ValueError) and "process 1 would never be read" in str(error)


def test_a_whole_batch_costs_one_exchange() -> None:
    def job(world: Any) -> int:
        share = partial(between_processes, device_counts=(1, 1))
        batches = of_process(DataLoader(Numbers(range(40)), batch_size=4), share, world)
        parts = list(batches)
        assert len(parts) == 10 and isinstance(parts[0], Slice)
        return world.calls

    assert together(job, 2) == [1 + 10 + 1] * 2  # its length; each batch; the end
