"""Splitting is arithmetic: laws for every number of samples and devices."""

import itertools
import math
import timeit
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_dp.parallel.split import (
    Planner,
    StepUsage,
    chunk,
    even,
    fitted,
    split_policy,
    weighted,
)
from lightning_dp.parallel.split.optimal import by_cost, minimax

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
        ((2, 1), [None, 1], 2, (3, 0)),
        ((32, 16, 16, 0), [28, None, None, None], 1, (28, 18, 18, 0)),  # in proportion
        ((8, 8, 0), [7, 7, None], 1, (7, 7, 2)),  # a device that was to have none comes last
    ],
)
def test_known_sizes(wanted: Any, caps: Any, least: int, sizes: Any) -> None:
    assert fitted(wanted, caps, least) == sizes


@given(costs, ks)
@example([5.0] * 10 + [0.0] * 10, 2)  # shares of equal sizes would cost 50 and 0
def test_by_cost_no_device_has_more_than_a_fair_share_and_one_sample(
    of: list[float], k: int
) -> None:
    sizes = by_cost(of, k)
    assert len(sizes) == k and sum(sizes) == len(of) and min(sizes) >= 0
    ends = list(itertools.accumulate(sizes, initial=0))
    loads = [math.fsum(of[a:b]) for a, b in itertools.pairwise(ends)]
    assert max(loads) <= (sum(of) / k + max(of, default=0.0)) * (1 + 1e-9)
    assert max(by_cost([0.5] * len(of), k)) <= len(of) // k + 1


# The planner

OPTIONS: list[dict[str, Any]] = [
    {},
    {"split": "chunk"},
    {"split": "adaptive"},
    {"split": "cost"},
    {"split": "memory"},
    {"split": "auto"},
    {"weights": [5, 1, 1, 1]},
    {"weights": [0, 1, 0, 2]},
    {"split": lambda n, devices: (max(n - 1, 0), *[0] * (len(devices) - 2), min(n, 1))},
]


def policy_of(k: int, split: Any = "even", weights: Any = None) -> Any:
    return split_policy(split, weights, range(k), lambda: [100] * k)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=4), st.integers(1, 60), st.integers(1, 2))
def test_a_split_that_fits_is_found_if_there_is_one(room: list[int], n: int, least: int) -> None:
    """A step fits where no device has more than its room; caps may be an eighth below that."""
    planner = Planner(len(room), policy_of(len(room)))
    for _ in range(200):
        sizes = planner.plan(n, list, training=True, least=lambda: least).sizes
        assert sum(sizes) == n
        assert all(not size or size >= min(least, n) for size in sizes), sizes
        failed = [k for k, size in enumerate(sizes) if size > room[k]]
        if not failed or not planner.record_oom(failed, training=True):
            break
    else:
        raise AssertionError("no end")
    lowest = [most + 1 - max(1, (most + 1) // 8) for most in room]
    assert not failed or not possible(n, lowest, least)


def test_caps_are_an_eighth_below_what_failed_and_evaluation_has_its_own() -> None:
    planner = Planner(2, policy_of(2))
    planner.plan(64, list, training=True)
    planner.record_oom([1], training=True)
    assert planner.plan(64, list, training=True).sizes == (36, 28)
    assert planner.plan(64, list, training=False).sizes == (32, 32)
    assert planner.plan(8, list, training=True).sizes == (4, 4)


@given(
    st.sampled_from(OPTIONS),
    st.lists(st.integers(1, 14), min_size=1, max_size=6),
    st.randoms(use_true_random=False),
)
def test_every_split_gives_two_samples_or_none_and_keeps_to_caps(
    options: dict[str, Any], batches: Any, draw: Any
) -> None:
    planner = Planner(4, policy_of(4, **options))
    for n in batches:
        of = [draw.choice([1.0, 2.0, 50.0]) for _ in range(n)]
        plan = planner.plan(n, lambda of=of: of, training=True, least=lambda: 2)
        assert sum(plan.sizes) == n
        assert all(size != 1 for size in plan.sizes) or n == 1
        busy = tuple(size * draw.uniform(0.5, 2.0) for size in plan.sizes)
        peaks = tuple(10 + 3 * size for size in plan.sizes)
        if hasattr(planner.policy, "learn"):
            planner.policy.learn(StepUsage(plan.sizes, busy, max(busy), peaks, (10,) * 4))
    most = max(plan.sizes)
    if most > 4:
        planner.record_oom([plan.sizes.index(most)], training=True)
        assert planner.plan(n, lambda: of, training=True).sizes[plan.sizes.index(most)] < most


# Time


def planned(split: Any, spread: float = 0.0, failed: int = 0) -> Callable[[], Any]:
    """A plan for 2^20 samples, by a policy that has seen steps of unequal speed and memory."""
    weights = [1.5, 2, 3, 4, 5, 6, 7, 8] if split == "weights" else None
    chosen = "even" if split == "weights" else split
    policy: Any = split_policy(chosen, weights, range(8), lambda: [10**10] * 8)
    draw = torch.Generator().manual_seed(0)
    costs = torch.randn(2**20, dtype=torch.float64, generator=draw).mul(spread).exp()
    planner = Planner(8, policy)
    for _ in range(6):
        sizes = planner.plan(2**20, lambda: costs, training=True).sizes
        busy = tuple(n * (k + 1) * 1e-6 for k, n in enumerate(sizes))
        if hasattr(policy, "learn"):
            peaks = tuple(10**9 + 100 * n for n in sizes)
            policy.learn(StepUsage(sizes, busy, max(busy), peaks, (10**9,) * 8))
    planner.record_oom(range(failed), training=True)
    return lambda: planner.plan(2**20, lambda: costs, training=True)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("options", [{}, {"failed": 3}, {"spread": 4.0}], ids=str)
@pytest.mark.parametrize("split", ["even", "weights", "adaptive", "memory", "auto", "cost"])
def test_a_million_samples_are_planned_in_two_milliseconds(
    split: str, options: dict[str, Any]
) -> None:
    """The least of many times is the plan's own; on a busy machine the limit is wider."""
    plan = planned(split, **options)
    assert min(timeit.repeat(plan, number=1, repeat=20)) <= 2e-3 * 3


# Options

FINITE = "weights: expected a list of finite numbers of at least 0, not all 0"


@pytest.mark.parametrize(
    ("split", "shares", "k", "message"),
    [
        ("banana", None, 2, "split: expected one of .*got 'banana'"),
        ("even", [1, 2], 3, "weights: expected 3 numbers, one per device, got 2"),
        *[("even", w, 2, FINITE) for w in ([0, 0], [1, -1], [1, math.nan], [1, math.inf])],
        *[("even", w, 2, FINITE) for w in ([1, "2"], [True, 1])],
        ("chunk", [1, 2], 2, "weights: expected None with split='chunk'"),
        ("adaptive", [0, 1], 2, r"weights: expected numbers above 0 .*got \[0, 1\]"),
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
