"""Splitting is arithmetic: laws for every number of samples and devices."""

import itertools
import math
import random
import sys
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_dp.parallel.split.arithmetic import (
    PLACED_SINGLY,
    by_cost,
    chunk,
    even,
    fitted,
    has_room,
    minimax,
    weighted,
)
from lightning_dp.parallel.split.policies import split_policy

counts = st.integers(0, 500)
ks = st.integers(1, 12)
weights = st.lists(st.floats(0, 1e6), min_size=1, max_size=12).filter(any)
times = st.floats(0, 1e3, allow_subnormal=False) | st.integers(0, 4).map(float)
devices = st.lists(st.tuples(times, times, st.none() | st.integers(0, 5)), min_size=1, max_size=4)
costs = st.lists(st.floats(0, 1e4, allow_subnormal=False), max_size=40)
some_sizes = st.lists(st.integers(0, 4), min_size=1, max_size=4).map(tuple)
some_caps = st.lists(st.none() | st.integers(0, 5), min_size=4, max_size=4)


@given(counts, ks)
def test_even_sizes_differ_by_at_most_one_and_the_larger_ones_come_first(n: int, k: int) -> None:
    sizes = even(n, k)
    assert len(sizes) == k and sum(sizes) == n
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)
    assert weighted(n, [0.1] * k) == minimax(n, [0.5] * k, [0.1] * k) == sizes


@given(counts, ks)
def test_chunk_cuts_as_torch_chunk_does(n: int, k: int) -> None:
    parts = [len(part) for part in torch.empty(n).chunk(k)] if n else []
    assert chunk(n, k) == tuple(parts + [0] * (k - len(parts)))


@given(counts, weights)
def test_weighted_sizes_are_their_quotas_rounded(n: int, shares: list[float]) -> None:
    sizes = weighted(n, shares)
    assert sum(sizes) == n
    for size, share in zip(sizes, shares, strict=True):
        quota = n * share / math.fsum(shares)
        assert math.floor(quota - 1e-6) <= size <= math.ceil(quota + 1e-6)
        assert size == 0 or share > 0


def slowest(sizes: tuple[int, ...], fixed: list[float], per_sample: list[float]) -> float:
    """When the last device ends that has samples."""
    ends = [f + p * n for n, f, p in zip(sizes, fixed, per_sample, strict=True) if n]
    return max(ends, default=0.0)


@given(st.integers(0, 7), devices)
def test_minimax_is_as_good_as_the_best_of_all_splits(
    n: int, described: list[tuple[float, float, int | None]]
) -> None:
    fixed, per_sample, caps = map(list, zip(*described, strict=True))
    limits = [n if cap is None else min(n, cap) for cap in caps]
    every = [s for s in product(*(range(limit + 1) for limit in limits)) if sum(s) == n]
    if not every:
        with pytest.raises(ValueError, match=rf"caps: expected room for {n} samples, got .* room"):
            minimax(n, fixed, per_sample, caps)
        return
    sizes = minimax(n, fixed, per_sample, caps)
    assert sizes in every
    assert slowest(sizes, fixed, per_sample) == min(slowest(s, fixed, per_sample) for s in every)


def possible(n: int, limits: Sequence[float], least: int) -> list[tuple[int, ...]]:
    """All sizes that a batch of n samples may have."""
    least = min(least, n)
    choices = [[0, *range(max(least, 1), int(min(n, limit)) + 1)] for limit in limits]
    return [sizes for sizes in itertools.product(*choices) if sum(sizes) == n]


@given(some_sizes, st.integers(1, 3), some_caps)
def test_sizes_are_fitted_where_any_sizes_fit(
    wanted: tuple[int, ...], least: int, caps: list[int | None]
) -> None:
    n, caps = sum(wanted), caps[: len(wanted)]
    limits = [math.inf if cap is None else cap for cap in caps]
    fit = possible(n, limits, least)
    sizes = fitted(wanted, caps, least)
    assert sizes in fit if fit else sizes is None
    assert has_room(n, caps, least) == bool(fit)
    assert sizes == wanted or wanted not in fit
    unlimited = fitted(wanted, None, least)
    assert unlimited is not None and unlimited in possible(n, [math.inf] * len(wanted), least)
    assert not [k for k, size in enumerate(unlimited) if size and not wanted[k]]


@pytest.mark.parametrize(
    ("wanted", "caps", "least", "sizes"),
    [
        ((2, 1, 1, 1), None, 2, (3, 2, 0, 0)),  # K + 1 samples
        ((1, 1, 1, 1), None, 2, (2, 2, 0, 0)),
        ((1, 1, 1, 0), None, 2, (3, 0, 0, 0)),
        ((63, 1), None, 2, (64, 0)),
        ((3, 3, 1), None, 2, (4, 3, 0)),
        ((0, 9, 1), None, 2, (0, 10, 0)),
        ((1, 0), None, 2, (1, 0)),
        ((0, 0), None, 2, (0, 0)),
        ((2, 1), [None, 1], 2, (3, 0)),
        ((32, 16, 16, 0), [28, None, None, None], 1, (28, 18, 18, 0)),  # in proportion
        ((8, 8, 0), [7, 7, None], 1, (7, 7, 2)),  # a device that was to have none comes last
    ],
)
def test_known_sizes(wanted: Any, caps: Any, least: int, sizes: Any) -> None:
    assert fitted(wanted, caps, least) == sizes


@given(costs, ks)
def test_by_cost_gives_every_sample_to_one_device(of: list[float], k: int) -> None:
    parts = by_cost(of, k)
    assert len(parts) == k
    assert sorted(i for part in parts for i in part) == list(range(len(of)))
    assert all(part == sorted(part) for part in parts)
    if any(of):  # no device has more than a fair share and one sample
        loads = [sum(of[i] for i in part) for part in parts]
        assert max(loads) <= (sum(of) / k + max(of) * (1 - 1 / k)) * (1 + 1e-9)


@given(costs, st.lists(st.floats(0, 1e4), min_size=1, max_size=5))
def test_by_cost_keeps_to_the_largest_loads(of: list[float], caps: list[float]) -> None:
    parts = by_cost(of, len(caps), caps)
    loads = [sum(of[i] for i in part) for part in parts]
    assert all(load <= cap * (1 + 1e-9) for load, cap in zip(loads, caps, strict=True))
    rooms = list(zip(loads, caps, strict=True))
    left = {*range(len(of))} - {i for part in parts for i in part}
    assert not [i for i in left if any(load + of[i] < cap for load, cap in rooms)]


@pytest.mark.parametrize("n", [64, 5 * PLACED_SINGLY])
def test_by_cost_balances_sequences_of_unequal_length(n: int) -> None:
    """Lognormal lengths on 4 devices, some placed one by one and some in blocks."""
    for seed in range(20):
        draw = random.Random(seed)
        lengths = [draw.lognormvariate(4, 0.6) for _ in range(n)]
        loads = [sum(lengths[i] for i in part) for part in by_cost(lengths, 4)]
        assert max(loads) / (sum(loads) / 4) <= 1.02


N = 2**20
SPLITS: dict[str, Callable[[], Any]] = {
    "even": lambda: even(N, 8),
    "chunk": lambda: chunk(N, 8),
    "weighted": lambda: weighted(N, [1.5, 2, 3, 4, 5, 6, 7, 8]),
    "minimax": lambda: minimax(N, [0.1 * i for i in range(8)], [1 + 0.01 * i for i in range(8)]),
    "caps": lambda: fitted(even(N, 8), [100, 5000, *[None] * 6], 2),
    "by_cost": lambda: by_cost([1.0] * N, 8),
}


@pytest.mark.parametrize("split", SPLITS)
def test_no_python_runs_once_per_sample(split: str) -> None:
    lines = 0

    def count(frame: Any, event: str, _: Any) -> Any:
        nonlocal lines
        lines += 1
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        SPLITS[split]()
    finally:
        sys.settrace(before)
    assert lines < 40_000


@pytest.mark.parametrize(
    ("split", "shares", "k", "message"),
    [
        ("banana", None, 2, "split: expected one of .*got 'banana'"),
        ("even", [1, 2], 3, "weights: expected 3 numbers, one per device, got 2"),
        ("even", [0, 0], 2, "weights: expected a list of finite numbers of at least 0, not all 0"),
        ("even", [1, -1], 2, "weights: expected a list of finite"),
        ("even", [1, math.nan], 2, "weights: expected a list of finite"),
        ("even", [1, math.inf], 2, "weights: expected a list of finite"),
        ("even", [1, "2"], 2, "weights: expected a list of finite"),
        ("even", [True, 1], 2, "weights: expected a list of finite"),
        ("chunk", [1, 2], 2, "weights: expected None with split='chunk'"),
        ("adaptive", [0, 1], 2, r"weights: expected numbers above 0 .*got \[0, 1\]"),
        ("adaptive", [1, 1], 3, "weights: expected 3 numbers, one per device, got 2"),
    ],
)
def test_impossible_splits_are_refused(
    split: str, shares: list[float] | None, k: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        split_policy(split, shares, ["cpu"] * k)


def test_a_function_of_ones_own_gets_the_batch_size_and_the_devices() -> None:
    def all_on_the_last(n: int, devices: Sequence[str]) -> list[int]:
        return [0] * (len(devices) - 1) + [n]

    assert split_policy(all_on_the_last, None, ["a", "b", "c"])(7) == (0, 0, 7)


@pytest.mark.parametrize("answer", [(3, 3), (7,), (8, -1), (3.5, 3.5), None, (True, 6)])
def test_its_impossible_answers_are_refused(answer: Any) -> None:
    with pytest.raises(ValueError, match=r"split: expected 2 integers .* with sum 7, from .*got"):
        split_policy(lambda n, devices: answer, None, ["a", "b"])(7)
