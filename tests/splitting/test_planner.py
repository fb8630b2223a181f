"""The planner keeps to what fits, to two samples where batch norm trains, and to the policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_split import possible

from lightning_dp.parallel.split import Planner, StepUsage, split_policy
from lightning_dp.parallel.split.adaptive import PROBE_EVERY, Adaptive
from lightning_dp.parallel.split.planner import Capacity

SPLITS: list[dict[str, Any]] = [
    {},
    {"split": "chunk"},
    {"split": "adaptive"},
    {"split": "cost"},
    {"split": "memory"},
    {"split": "auto"},
    {"weights": [5, 1, 1, 1]},
    {"weights": [0, 1, 0, 2]},
    {"split": lambda n, devices: (n - n // 2, *[0] * (len(devices) - 2), n // 2)},
    {"split": lambda n, devices: (max(n - 1, 0), *[0] * (len(devices) - 2), min(n, 1))},
]


def policy_of(k: int, split: Any = "even", weights: Any = None) -> Any:
    return split_policy(split, weights, range(k), lambda: [100] * k)


# What fits


@given(st.lists(st.integers(0, 12), min_size=1, max_size=4), st.integers(1, 30), st.integers(1, 2))
def test_a_split_that_fits_is_found_if_there_is_one(room: list[int], n: int, least: int) -> None:
    """A step fits where no device has more than its room; all others run out of memory."""
    planner = Planner(len(room), policy_of(len(room)))
    found = False

    def attempt(sizes: Sequence[int]) -> bool:
        assert all(not size or size >= min(least, n) for size in sizes), sizes
        failed = [k for k, size in enumerate(sizes) if size > room[k]]
        if failed:
            planner.record_oom(failed, training=True)
        else:
            planner.record_success(training=True)
        return not failed

    for _ in range(200):
        sizes = planner.plan(n, list, training=True, least=lambda: least).sizes
        assert sum(sizes) == n
        found = attempt(sizes)
        if found:
            break
        if not planner.has_room(n, training=True):
            while (trial := planner.trial(n, training=True)) is not None:
                attempt(trial.sizes)
            if planner.most(n, training=True) < n:
                break
    else:
        raise AssertionError("no end")
    assert found == bool(possible(n, room, least))
    if not found:
        # Whether fewer would do is not tried: the module refuses them, as far as is known.
        tried = (0, *range(min(least, n), n))
        largest = max(m for m in tried if possible(m, room, least))
        assert planner.most(n, training=True) == largest


def test_what_each_device_took_is_tried_on_all_at_once() -> None:
    """The root may hold what the others send it, and then its room depends on theirs."""
    capacity = Capacity(2)
    capacity.record_success((20, 10))
    capacity.record_success((10, 20))
    capacity.record_oom((21, 21), [0, 1])
    tried = []
    while (sizes := capacity.trial(60)) is not None:
        tried.append(sizes)
        if sum(sizes) > 35:
            capacity.record_oom(sizes, [0])
        else:
            capacity.record_success(sizes)
    assert sum(capacity.fits) <= 35 and tried[-1] == capacity.fits


def test_a_heavier_batch_makes_less_fit() -> None:
    capacity = Capacity(2)
    capacity.record_success((20, 20))
    capacity.record_oom((20, 20), [0])
    assert capacity.caps == [19, None] and capacity.fits == (19, 20)


def test_evaluation_has_caps_of_its_own() -> None:
    planner = Planner(2, policy_of(2))
    planner.plan(8, list, training=True)
    planner.record_oom([0], training=True)
    assert planner.plan(8, list, training=False).sizes == (4, 4)
    assert planner.plan(8, list, training=True).sizes == (3, 5)


# Every split


@given(
    st.sampled_from(SPLITS),
    st.lists(st.integers(1, 14), min_size=1, max_size=6),
    st.randoms(use_true_random=False),
)
def test_every_split_gives_two_samples_or_none(
    options: dict[str, Any], batches: Any, draw: Any
) -> None:
    planner = Planner(4, policy_of(4, **options))
    for n in batches:
        costs = [draw.choice([1.0, 2.0, 50.0]) for _ in range(n)]
        plan = planner.plan(n, lambda c=costs: c, training=True, least=lambda: 2)
        assert sum(plan.sizes) == n
        assert all(size != 1 for size in plan.sizes) or n == 1
        if plan.order is not None:
            assert sorted(i for part in plan.order for i in part) == list(range(n))
            assert tuple(map(len, plan.order)) == plan.sizes
            assert plan.loads == tuple(sum(costs[i] for i in part) for part in plan.order)
        busy = tuple(size * draw.uniform(0.5, 2.0) for size in plan.sizes)
        peaks = tuple(10 + 3 * size for size in plan.sizes)
        planner.learn(StepUsage(plan.sizes, busy, max(busy), peaks, (10,) * 4))
        planner.record_success(training=True)


def test_the_fewest_samples_are_asked_only_where_a_shard_has_one() -> None:
    def least() -> int:
        raise AssertionError("asked")

    planner = Planner(2, policy_of(2))
    assert planner.plan(4, list, training=True, least=least).sizes == (2, 2)
    assert planner.plan(1, list, training=True, least=least).sizes == (1, 0)


def test_loads_that_do_not_fit_any_more_make_it_a_split_by_number() -> None:
    planner = Planner(2, policy_of(2, "cost"))
    costs = [1.0, 1.0, 8.0]
    plan = planner.plan(3, lambda: costs, training=True)
    assert plan.sizes == (1, 2) and plan.loads == (8.0, 2.0)
    planner.record_oom([0], training=True)  # from now on at most 7 there
    assert planner.plan(3, lambda: costs, training=True).order == [[0, 1], [2]]
    planner.record_oom([1], training=True)
    plan = planner.plan(3, lambda: costs, training=True)
    assert plan.loads == () and plan.order is None and sum(plan.sizes) == 3


def test_idle_devices_are_probed_with_two_samples() -> None:
    split = Adaptive(2)
    sizes = set()
    for _ in range(2 * PROBE_EVERY):
        a, b = split(8)
        sizes.add((a, b))
        split.learn(StepUsage((a, b), (a * 0.01, b * 9.0)))
    assert (8, 0) in sizes and (6, 2) in sizes and not [s for s in sizes if 1 in s and s != (7, 1)]


# Plans that are used again

STEPS = st.tuples(
    st.sampled_from(["plan", "whole", "out of memory", "trial", "done"]),
    st.integers(1, 12),
    st.booleans(),
)


@given(st.lists(STEPS, max_size=30), st.integers(1, 3), st.sampled_from([None, [1, 2, 0]]))
def test_a_repeated_plan_is_what_the_planner_would_decide(
    steps: list[tuple[str, int, bool]], least: int, weights: list[float] | None
) -> None:
    asked, repeating = (Planner(3, policy_of(3, weights=weights)) for _ in range(2))
    trains = True
    for what, n, training in steps:
        trains = training if what == "plan" else trains
        if what == "plan":
            plan = asked.plan(n, list, least=lambda: least, training=training)
            if repeating.repeated != (n, training):
                kind = (n, training)
                repeating.plan(n, list, least=lambda: least, kind=kind, training=training)
            assert repeating.latest.sizes == plan.sizes
        for planner in (asked, repeating):
            if what == "whole":
                planner.whole()
            elif what == "trial":
                trains = trains if planner.trial(n, training=training) is None else training
            elif what == "done":
                planner.record_success(training=trains)
            elif what == "out of memory" and planner.latest.sizes[0]:
                planner.record_oom([0], training=trains)


@pytest.mark.parametrize("split", ["adaptive", "memory", "auto", "cost"])
def test_splits_that_learn_or_read_costs_are_never_repeated(split: str) -> None:
    planner = Planner(2, policy_of(2, split))
    planner.plan(8, lambda: [1.0] * 8, training=True, kind=8)
    assert planner.repeated is None
