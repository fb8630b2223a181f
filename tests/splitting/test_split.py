"""Splitting is arithmetic: laws for every number of samples and devices."""

import math
import random
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_dp.parallel.split.arithmetic import by_cost, chunk, even, minimax, weighted
from lightning_dp.parallel.split.policies import split_policy

counts = st.integers(0, 500)
ks = st.integers(1, 12)
weights = st.lists(st.floats(0, 1e6), min_size=1, max_size=12).filter(any)


@given(counts, ks)
def test_even_sizes_sum_to_the_batch_and_differ_by_at_most_one(n: int, k: int) -> None:
    sizes = even(n, k)
    assert len(sizes) == k and sum(sizes) == n
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)


@given(counts, ks)
def test_chunk_cuts_as_torch_chunk_does(n: int, k: int) -> None:
    sizes = chunk(n, k)
    parts = [len(part) for part in torch.empty(n).chunk(k)] if n else []
    assert sizes == tuple(parts + [0] * (k - len(parts)))


@given(counts, weights)
def test_weighted_sizes_are_their_quotas_rounded(n: int, shares: list[float]) -> None:
    sizes = weighted(n, shares)
    assert sum(sizes) == n
    for size, share in zip(sizes, shares, strict=True):
        quota = n * share / math.fsum(shares)
        assert math.floor(quota - 1e-6) <= size <= math.ceil(quota + 1e-6)
        assert size == 0 or share > 0


@given(counts, ks)
def test_equal_weights_are_the_even_split(n: int, k: int) -> None:
    assert weighted(n, [0.1] * k) == even(n, k)


times = st.floats(0, 1e3, allow_subnormal=False)
devices = st.lists(st.tuples(times, times, st.none() | st.integers(0, 5)), min_size=1, max_size=4)


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
    best = min(slowest(split, fixed, per_sample) for split in every)
    assert slowest(sizes, fixed, per_sample) == best


@given(counts, ks)
def test_minimax_of_equal_devices_is_the_even_split(n: int, k: int) -> None:
    assert minimax(n, [0.5] * k, [0.1] * k) == even(n, k)


costs = st.lists(st.floats(0, 1e4, allow_subnormal=False), max_size=40)


@given(costs, ks)
def test_by_cost_gives_every_sample_to_one_device(of: list[float], k: int) -> None:
    parts = by_cost(of, k)
    assert len(parts) == k
    assert sorted(i for part in parts for i in part) == list(range(len(of)))
    assert all(part == sorted(part) for part in parts)


@given(costs.filter(any), st.integers(1, 6))
def test_no_device_ends_later_than_a_fair_share_and_one_sample(of: list[float], k: int) -> None:
    loads = [sum(of[i] for i in part) for part in by_cost(of, k)]
    assert max(loads) <= (sum(of) / k + max(of) * (1 - 1 / k)) * (1 + 1e-9)


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=6))
def test_by_cost_gives_faster_devices_more(speeds: list[float]) -> None:
    loads = [len(part) for part in by_cost([1.0] * 60, len(speeds), speeds)]
    for load, speed in zip(loads, speeds, strict=True):
        assert abs(load - 60 * speed / sum(speeds)) <= len(speeds)


def test_by_cost_balances_sequences_of_unequal_length() -> None:
    """Lognormal lengths, 64 sequences on 4 devices, against what chunk gives them."""
    worst, chunked = [], []
    for seed in range(20):
        draw = random.Random(seed)
        lengths = [draw.lognormvariate(4, 0.6) for _ in range(64)]
        loads = [sum(lengths[i] for i in part) for part in by_cost(lengths, 4)]
        chunks = [sum(lengths[i : i + 16]) for i in range(0, 64, 16)]
        worst.append(max(loads) / (sum(loads) / 4))
        chunked.append(max(chunks) / (sum(chunks) / 4))
    assert max(worst) <= 1.02
    assert sum(chunked) / len(chunked) > 1.15


@pytest.mark.parametrize(
    ("n", "k", "sizes"),
    [
        (30, 8, (4, 4, 4, 4, 4, 4, 3, 3)),
        (10, 8, (2, 2, 1, 1, 1, 1, 1, 1)),
        (2, 4, (1, 1, 0, 0)),
        (0, 2, (0, 0)),
    ],
)
def test_even_split_of_known_batches(n: int, k: int, sizes: tuple[int, ...]) -> None:
    assert even(n, k) == sizes


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
