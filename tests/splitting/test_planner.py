"""The planner keeps to what fits, to two samples where batch norm trains, and to the policy."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from test_split import possible

from lightning_dp.parallel.split import Planner, StepUsage, split_policy

SPLITS: list[dict[str, Any]] = [
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


def cap(failed: int) -> int:
    return failed - max(1, failed // 8)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=4), st.integers(1, 60), st.integers(1, 2))
def test_a_split_that_fits_is_found_if_there_is_one(room: list[int], n: int, least: int) -> None:
    """A step fits where no device has more than its room; caps may be an eighth below that."""
    planner = Planner(len(room), policy_of(len(room)))
    for _ in range(200):
        sizes = planner.plan(n, list, training=True, least=lambda: least).sizes
        assert sum(sizes) == n
        assert all(not size or size >= min(least, n) for size in sizes), sizes
        failed = [k for k, size in enumerate(sizes) if size > room[k]]
        if failed:
            planner.record_oom(failed, training=True)
        if not failed or not planner.has_room(n, training=True):
            break
    else:
        raise AssertionError("no end")
    assert not failed or not possible(n, [cap(most + 1) for most in room], least)


def test_caps_are_an_eighth_below_what_failed_and_evaluation_has_its_own() -> None:
    planner = Planner(2, policy_of(2))
    planner.plan(64, list, training=True)
    planner.record_oom([1], training=True)
    assert planner.plan(64, list, training=True).sizes == (36, 28)
    assert planner.plan(64, list, training=False).sizes == (32, 32)
    assert planner.plan(8, list, training=True).sizes == (4, 4)


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
        busy = tuple(size * draw.uniform(0.5, 2.0) for size in plan.sizes)
        peaks = tuple(10 + 3 * size for size in plan.sizes)
        planner.learn(StepUsage(plan.sizes, busy, max(busy), peaks, (10,) * 4))


def test_a_split_by_cost_is_by_number_after_out_of_memory_or_where_each_needs_two() -> None:
    planner = Planner(2, policy_of(2, "cost"))

    def plan(least: int = 1) -> Any:
        return planner.plan(3, lambda: [1.0, 8.0, 6.0], training=True, least=lambda: least)

    assert plan().order == [[1], [0, 2]]
    assert plan(least=2).order is None and plan(least=2).sizes == (3, 0)
    plan()
    planner.record_oom([1], training=True)
    assert plan().order is None and plan().sizes == (2, 1)
