"""Worlds without processes: each rank in turn, or each in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch

from lightning_dp.parallel.processes import World


class InTurn(World):
    """One rank of several that run one after another, the first one first.

    What the first says is what all hear; a rank that tells something else learns it by `gather`.
    """

    def __init__(self, rank: int, size: int, said: list[Any]) -> None:
        self.rank, self.size, self.is_idle = rank, size, False
        self.device_counts = (1,) * size
        self._said, self._place = said, 0

    def _heard(self, value: Any) -> Any:
        if self.rank == 0:
            self._said.append(value)
        self._place += 1
        return self._said[self._place - 1]

    def gather(self, value: Any) -> list[Any]:
        first = self._heard(value)
        return [first, *[value] * (self.size - 1)]

    def broadcast(self, value: Any, src: int = 0) -> Any:
        assert src == 0
        return self._heard(value)


class Together(World):
    """One rank of several that run in threads; the process's random numbers are those of all."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, table: list[Any]) -> None:
        self.rank, self.size, self.is_idle = rank, size, False
        self.device_counts = (1,) * size
        self._barrier, self._table = barrier, table
        self.calls = 0

    def gather(self, value: Any) -> list[Any]:
        self.calls += 1
        self._table[self.rank] = value
        self._barrier.wait(60)
        told = list(self._table)
        self._barrier.wait(60)
        return told

    def broadcast(self, value: Any, src: int = 0) -> Any:
        return self.gather(value)[src]

    def sum_(self, tensor: torch.Tensor) -> None:
        tensor.copy_(torch.stack([t.clone() for t in self.gather(tensor.clone())]).sum(0))


def in_turn(job: Callable[[World], Any], size: int, seed: int = 0) -> list[Any]:
    """What `job` returns in each rank; their random numbers are different ones."""
    said: list[Any] = []
    results = []
    for rank in range(size):
        torch.manual_seed(seed + rank)
        results.append(job(InTurn(rank, size, said)))
    return results


def together(job: Callable[[World], Any], size: int) -> list[Any]:
    """What `job` returns in each rank, or the error that it has raised."""
    barrier, table = threading.Barrier(size), [None] * size
    results: list[Any] = [None] * size

    def work(rank: int) -> None:
        try:
            results[rank] = job(Together(rank, size, barrier, table))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def flat(lists: Iterable[Iterable[Any]]) -> list[Any]:
    """The items of all lists, in order."""
    return list(chain.from_iterable(lists))
