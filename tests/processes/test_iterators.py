"""Iterators that a step takes its batches from itself: `dataloader_iter`, in several processes."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from worlds import in_turn

from lightning_dp.modes.dataloader_iter import Pulled
from lightning_dp.parallel.processes import World
from lightning_dp.processes.loaders import is_idle_in, is_of_several, open_fetcher
from lightning_dp.processes.slices import Slice


class Given(Iterator[Any]):
    """As Lightning's: it asks the iterator of a fetcher."""

    def __init__(self, batches: list[Any]) -> None:
        numbered = [(batch, i, 0) for i, batch in enumerate(batches)]
        self.data_fetcher: Any = SimpleNamespace(iterator=iter(numbered))

    def __next__(self) -> Any:
        return next(self.data_fetcher.iterator)


def world_of(rank: int) -> World:
    return in_turn(lambda world: world, 2)[rank]


def slices(rank: int, *sizes: tuple[int, int]) -> list[Slice]:
    return [Slice(torch.ones(max(1, own[rank]), 3), own, rank) for own in sizes]


def pulled(rank: int, *sizes: tuple[int, int]) -> Pulled:
    given = Given(slices(rank, *sizes))
    open_fetcher(given, world_of(rank))
    return Pulled(LightningModule(), given)


def test_batches_come_without_slices_and_the_world_knows_who_is_idle() -> None:
    given, world = Given(slices(1, (2, 2), (1, 0), (2, 1))), world_of(1)
    open_fetcher(given, world)
    open_fetcher(given, world)  # at every step
    assert is_of_several(given)
    seen = []
    for batch, i, j in given:
        assert isinstance(batch, Tensor) and is_idle_in(given) is world.is_idle
        seen.append((len(batch), i, j, world.is_idle))
    assert seen == [(2, 0, 0, False), (1, 1, 0, True), (1, 2, 0, False)]


def test_what_is_no_such_iterator_is_left_alone() -> None:
    for other in (torch.ones(2), iter([1]), {"data_fetcher": 1}):
        open_fetcher(other, world_of(0))
        assert not is_of_several(other) and not is_idle_in(other)


@pytest.mark.parametrize("replicas", [1, 2])
def test_batches_of_one_step_are_of_one_size_in_each_process(replicas: int) -> None:
    calls: Any = SimpleNamespace(sizes=(1,) * replicas, order=None)
    own = pulled(0, (replicas, 2), (replicas, 2))
    own.first()
    assert sum(len(shard) for shard in own.more(calls, [1])) == replicas
    other = pulled(0, (replicas, 2), (3, 2))
    other.first()
    with pytest.raises(ValueError, match=f"got {replicas} and then 3 samples"):
        other.more(calls, [1])


def test_a_process_that_is_idle_in_a_part_of_a_steps_batches_is_refused() -> None:
    """The step would count for nothing, or the sample that it has not would count."""
    calls: Any = SimpleNamespace(sizes=(1,), order=None)
    for sizes, text in (([(1, 1), (1, 0)], "1 and then 0"), ([(1, 0), (1, 1)], "0 and then 1")):
        own = pulled(1, *sizes)
        own.first()
        with pytest.raises(ValueError, match=f"got {text} samples"):
            own.more(calls, [1])
    idle = pulled(1, (1, 0), (1, 0))
    idle.first()
    assert len(idle.more(calls, [1])) == 1
