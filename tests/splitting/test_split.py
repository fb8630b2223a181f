"""Splitting is arithmetic: laws for every number of samples and devices, and a limit of time."""

import itertools
import math
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_dp.parallel.split import (
    Adaptive,
    Auto,
    Memory,
    Planner,
    StepUsage,
    by_cost,
    chunk,
    even,
    fitted,
    minimax,
    split_policy,
    weighted,
)

counts, ks = st.integers(0, 500), st.integers(1, 12)
weights = st.lists(st.floats(0, 1e6), min_size=1, max_size=12).filter(any)
times = st.floats(0, 1e3, allow_subnormal=False) | st.integers(0, 4).map(float)
devices = st.lists(st.tuples(times, times, st.none() | st.integers(0, 5)), min_size=1, max_size=4)
costs = st.lists(st.floats(0, 1e4, allow_subnormal=False), max_size=40)
some_sizes = st.lists(st.integers(0, 4), min_size=1, max_size=4).map(tuple)
some_caps = st.lists(st.none() | st.integers(0, 5), min_size=4, max_size=4)


@given(counts, ks, weights)
def test_fixed_splits(n: int, k: int, shares: list[float]) -> None:
    sizes = even(n, k)
    assert len(sizes) == k and sum(sizes) == n and max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)
    assert weighted(n, [0.1] * k) == minimax(n, [0.5] * k, [0.1] * k) == sizes
    parts = [len(part) for part in torch.empty(n).chunk(k)] if n else []
    assert chunk(n, k) == tuple(parts + [0] * (k - len(parts)))
    assert sum(weighted(n, shares)) == n
    for size, share in zip(weighted(n, shares), shares, strict=True):
        quota = n * share / math.fsum(shares)
        assert math.floor(quota - 1e-6) <= size <= math.ceil(quota + 1e-6)
        assert size == 0 or share > 0


def slowest(sizes: tuple[int, ...], fixed: list[float], per_sample: list[float]) -> float:
    """When the last device ends that has samples."""
    ends = [f + p * n for n, f, p in zip(sizes, fixed, per_sample, strict=True) if n]
    return max(ends, default=0.0)


def possible(n: int, limits: Sequence[float], least: int) -> list[tuple[int, ...]]:
    """All sizes that a batch of n samples may have."""
    least = min(least, n)
    choices = [[0, *range(max(least, 1), int(min(n, limit)) + 1)] for limit in limits]
    return [sizes for sizes in itertools.product(*choices) if sum(sizes) == n]


@given(st.integers(0, 7), devices)
def test_minimax_is_as_good_as_the_best_of_all_splits(
    n: int, described: list[tuple[float, float, int | None]]
) -> None:
    fixed, per_sample, caps = map(list, zip(*described, strict=True))
    every = possible(n, [n if cap is None else cap for cap in caps], 1)
    if not every:
        with pytest.raises(ValueError, match=rf"caps: expected room for {n} samples, got .* room"):
            minimax(n, fixed, per_sample, caps)
        return
    sizes = minimax(n, fixed, per_sample, caps)
    assert sizes in every
    best = min(slowest(s, fixed, per_sample) for s in every)
    assert slowest(sizes, fixed, per_sample) <= best * (1 + 1e-12)


@given(some_sizes, st.integers(1, 3), some_caps)
def test_sizes_are_fitted_where_any_sizes_fit(
    wanted: tuple[int, ...], least: int, caps: list[int | None]
) -> None:
    n, caps = sum(wanted), caps[: len(wanted)]
    fit = possible(n, [math.inf if cap is None else cap for cap in caps], least)
    sizes = fitted(wanted, caps, least)
    assert sizes in fit if fit else sizes is None
    assert sizes == wanted or wanted not in fit
    unlimited = fitted(wanted, None, least)
    assert unlimited is not None and unlimited in possible(n, [math.inf] * len(wanted), least)
    assert not [k for k, size in enumerate(unlimited) if size and not wanted[k]]


@pytest.mark.parametrize(
    ("wanted", "caps", "least", "sizes"),
    [
        ((2, 1, 1, 1), None, 2, (3, 2, 0, 0)),  # K + 1 samples
        ((1, 1, 1, 0), None, 2, (3, 0, 0, 0)),
        ((0, 9, 1), None, 2, (0, 8, 2)),
        ((1, 0), None, 2, (1, 0)),
        ((2, 1), [None, 1], 2, (3, 0)),
        ((32, 16, 16, 0), [28, None, None, None], 1, (28, 18, 18, 0)),  # in proportion
        ((8, 8, 0), [7, 7, None], 1, (7, 7, 2)),  # a device that was to have none comes last
    ],
)
def test_known_sizes(wanted: Any, caps: Any, least: int, sizes: Any) -> None:
    assert fitted(wanted, caps, least) == sizes


def checked(of: Any, k: int) -> Any:
    """The shares by cost, after a check that every sample is on one device."""
    shares = by_cost(of, k)
    assert len(shares.parts) == k
    assert sorted(i for part in shares.parts for i in part) == list(range(len(of)))
    assert all(list(part) == sorted(part) for part in shares.parts)
    loads = [math.fsum(float(of[i]) for i in part) for part in shares.parts]
    assert shares.loads == pytest.approx(loads, rel=1e-9, abs=1e-9 * (sum(loads) + 1))
    return shares


@given(costs, ks)
def test_by_cost_no_device_has_more_than_a_fair_share_and_one_sample(
    of: list[float], k: int
) -> None:
    most = (sum(of) / k + max(of, default=0.0)) * (1 + 1e-9)
    assert max(checked(of, k).loads) <= most


@pytest.mark.parametrize(
    ("n", "k", "draw"),
    [
        (64, 4, lambda draw: draw.lognormvariate(4, 0.6)),
        (1280, 4, lambda draw: draw.lognormvariate(4, 0.6)),
        (5000, 4, lambda draw: 1 + 999 * (draw.random() < 0.002)),
        (2000, 3, lambda draw: float(draw.random() < 0.5)),
        (20000, 4, lambda draw: draw.lognormvariate(4, 2)),  # slices of the batch
    ],
)
def test_by_cost_balances_samples_of_unequal_cost(n: int, k: int, draw: Any) -> None:
    for seed in range(3):
        source = random.Random(seed)
        loads = checked([draw(source) for _ in range(n)], k).loads
        assert max(loads) / (sum(loads) / k) <= 1.02


# Time

N, DEVICES = 2**20, 8


def costs_of(spread: float) -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(N, dtype=torch.float64, generator=draw).mul(spread).exp()


def learnt(split: Any) -> Any:
    """A split that has seen some steps of devices of unequal speed and memory."""
    for _ in range(6):
        sizes = split(N)
        busy = tuple(n * (k + 1) * 1e-6 for k, n in enumerate(sizes))
        peaks = tuple(10**9 + 100 * n for n in sizes)
        split.learn(StepUsage(sizes, busy, max(busy), peaks, (10**9,) * DEVICES))
    return split


def planned(policy: Any, of: torch.Tensor | None = None, failed: int = 0) -> Callable[[], Any]:
    planner = Planner(DEVICES, policy)
    plan = lambda: planner.plan(N, lambda: of, training=True)
    plan()
    planner.record_oom(range(failed), training=True)
    return plan


SPLITS: dict[str, Callable[[], Callable[[], Any]]] = {
    "even": lambda: planned(split_policy("even", None, range(8))),
    "weights": lambda: planned(split_policy("even", [1.5, 2, 3, 4, 5, 6, 7, 8], range(8))),
    "callable": lambda: planned(split_policy(lambda n, d: even(n, len(d)), None, range(8))),
    "even, after out of memory": lambda: planned(split_policy("even", None, range(8)), failed=3),
    "adaptive": lambda: planned(learnt(Adaptive(DEVICES))),
    "memory": lambda: planned(learnt(Memory(range(DEVICES), lambda: [10**10] * DEVICES))),
    "auto": lambda: planned(learnt(Auto(range(DEVICES)))),
    "cost, equal": lambda: planned(split_policy("cost", None, range(8)), costs_of(0.0)),
    "cost, heavy tails": lambda: planned(split_policy("cost", None, range(8)), costs_of(4.0)),
}


@pytest.mark.parametrize("split", SPLITS)
def test_a_million_samples_are_planned_in_two_milliseconds(split: str, one_thread: None) -> None:
    """The least of many times is the plan's own; on a busy machine the limit is wider."""
    plan, seconds = SPLITS[split](), []
    assert sum(plan().sizes) == N and plan().order is None
    for _ in range(20):
        start = time.perf_counter()
        plan()
        seconds.append(time.perf_counter() - start)
    print(f"{split:28} {min(seconds) * 1e3:8.3f} ms")
    assert min(seconds) <= 2e-3 * 3


# Options


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
def test_impossible_splits_are_refused(split: str, shares: Any, k: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_policy(split, shares, ["cpu"] * k)


def test_a_function_of_ones_own_is_checked() -> None:
    own = split_policy(lambda n, devices: [0] * (len(devices) - 1) + [n], None, ["a", "b", "c"])
    assert own(7) == (0, 0, 7)
    for answer in [(3, 3), (7,), (8, -1), (3.5, 3.5), None, (True, 6)]:
        impossible: Any = lambda n, devices, answer=answer: answer
        with pytest.raises(ValueError, match=r"split: expected 2 integers .* sum 7, from .*got"):
            split_policy(impossible, None, ["a", "b"])(7)
