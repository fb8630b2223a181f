"""Exchanges give everybody what everybody said, in one round trip in the steady state."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_codec import TREES, Told, same
from torch import Tensor

from lightning_dp.parallel.processes.exchange import Capacity, Exchange


class Board:
    """Threads in place of processes; counts their round trips."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=20)
        self.sent: list[Tensor | None] = [None] * size
        self.trips = self.bytes = 0


class OnBoard:
    def __init__(self, rank: int, board: Board) -> None:
        self.rank, self.board = rank, board

    def all_gather(self, parts: list[Tensor], own: Tensor) -> None:
        self._meet(own)
        for part, sent in zip(parts, self.board.sent, strict=True):
            assert sent is not None and part.numel() == sent.numel()
            part.copy_(sent)
        self.board.barrier.wait()

    def broadcast(self, own: Tensor, src: int) -> None:
        self._meet(own)
        sent = self.board.sent[src]
        assert sent is not None and own.numel() == sent.numel()
        if self.rank != src:
            own.copy_(sent)
        self.board.barrier.wait()

    def _meet(self, own: Tensor) -> None:
        self.board.sent[self.rank] = own
        if self.board.barrier.wait() == 0:
            self.board.trips += 1
            self.board.bytes += own.numel()
        self.board.barrier.wait()


class Talk:
    """So many exchanges, and what they say in one call after another."""

    def __init__(self, size: int) -> None:
        self.size, self.board = size, Board(size)
        self.exchanges = [Exchange(r, size, OnBoard(r, self.board)) for r in range(size)]
        self._pool = ThreadPoolExecutor(size)  # the same threads: new ones are slow at first

    def __enter__(self) -> Talk:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def gather(self, values: Sequence[Any]) -> list[list[Any]]:
        return self.run(lambda r: self.exchanges[r].gather(values[r]))

    def broadcast(self, values: Sequence[Any], src: int) -> list[Any]:
        return self.run(lambda r: self.exchanges[r].broadcast(values[r], src))

    def run(self, call: Callable[[int], Any]) -> list[Any]:
        return list(self._pool.map(call, range(self.size)))

    def trips(self, values: Sequence[Any]) -> int:
        before = self.board.trips
        for got in self.gather(values):
            assert same(list(values), got)
        return self.board.trips - before


@pytest.fixture
def talk() -> Iterator[Talk]:
    with Talk(2) as own:
        yield own


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(2, 3))
def test_everybody_gets_what_everybody_said(data: st.DataObject, size: int) -> None:
    with Talk(size) as talk:
        for _ in range(data.draw(st.integers(1, 4))):
            values = data.draw(st.lists(TREES, min_size=size, max_size=size))
            if data.draw(st.booleans()):
                assert all(same(values, got) for got in talk.gather(values))
            else:
                src = data.draw(st.integers(0, size - 1))
                assert all(same(values[src], got) for got in talk.broadcast(values, src))


def test_what_is_told_in_every_step_is_one_round_trip(talk: Talk) -> None:
    assert talk.trips([(1.0, 2), (3.0, 4)]) == 2
    for step in range(5):
        assert talk.trips([(0.5, step), (step / 3, 7)]) == 1
    # Known of one process is known of all.
    assert talk.trips([{"a": 1.0}, (1.0, 2)]) == 2
    assert talk.trips([(1.0, 2), {"a": 1.0}]) == 1


def test_of_batches_of_many_sizes_only_the_first_costs_more(talk: Talk) -> None:
    talk.trips([torch.ones(3, 2), torch.ones(1)])
    for n in range(8):
        assert talk.trips([torch.ones(n, 3), torch.ones(n)]) == 1


def test_long_payloads_make_the_capacity_grow_and_short_ones_shrink_it(talk: Talk) -> None:
    short, long = [1.0, 2.0], [torch.ones(300), torch.ones(2)]
    assert [talk.trips(long), talk.trips(long)] == [2, 1]
    for _ in range(2 * Capacity.PATIENCE):
        talk.trips(short)
    before = talk.board.bytes
    assert talk.trips(short) == 1
    assert talk.board.bytes - before < 2 * Capacity.LEAST


def test_what_is_never_short_does_not_make_all_else_long(talk: Talk) -> None:
    large = [torch.ones(100_000), torch.zeros(0)]
    assert [talk.trips(large), talk.trips(large), talk.trips([1.0, 2.0])] == [2, 2, 2]
    before = talk.board.bytes
    assert talk.trips([1.0, 2.0]) == 1
    assert talk.board.bytes - before < 2 * Capacity.LEAST


def test_ever_new_texts_are_forgotten(talk: Talk) -> None:
    talk.trips([("steady", 1.0)] * 2)
    for step in range(600):
        talk.gather([f"step {step}", ("steady", 1.0)])
    known = [list(exchange._known) for exchange in talk.exchanges]
    assert known[0] == known[1] and len(known[0]) <= 256
    assert talk.trips([("steady", 1.0)] * 2) == 1


def test_long_skeletons_are_not_kept(talk: Talk) -> None:
    names = {f"a name {i}": 1.0 for i in range(10_000)}
    assert [talk.trips([names, names]), talk.trips([names, names])] == [2, 2]
    assert not any(len(s) > 2**16 for s in talk.exchanges[0]._known.values())


@pytest.mark.parametrize("bad", [0, 1])
def test_what_cannot_be_sent_is_refused_everywhere_and_goes_on(talk: Talk, bad: int) -> None:
    values: list[Any] = [1.0, 2.0]
    values[bad] = lambda: 0

    def refused(call: Callable[[Exchange], Any]) -> Callable[[int], Any]:
        def run(rank: int) -> str:
            with pytest.raises(TypeError) as caught:
                call(talk.exchanges[rank])
            return str(caught.value)

        return run

    texts = talk.run(lambda r: refused(lambda e: e.gather(values[r]))(r))
    texts += talk.run(lambda r: refused(lambda e: e.broadcast(values[r], bad))(r))
    assert all(text.startswith(f"Process {bad}: expected something") for text in texts)
    assert all(same([1.0, 2.0], got) for got in talk.gather([1.0, 2.0]))


def test_calls_that_are_not_the_same_everywhere_are_noticed(talk: Talk) -> None:
    """One process has had an exchange that the other has not."""
    with Talk(2) as alone:
        alone.gather([Told("loss", 1.0)] * 2)
    talk.exchanges[0]._known.update(alone.exchanges[0]._known)

    def call(rank: int) -> str:
        try:
            return str(talk.exchanges[rank].gather(Told("loss", 1.0) if rank == 0 else 1.0))
        except RuntimeError as error:
            return str(error)

    assert "at the same places of the program" in talk.run(call)[1]
