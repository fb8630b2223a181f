"""The search for the devices that work, and their sizes, against all splits one by one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dp.parallel.split.active import best_active, best_with, between, step_seconds
from lightning_dp.parallel.split.arithmetic import Sizes


def all_splits(n: int, caps: list[int | None]) -> Iterator[Sizes]:
    if len(caps) == 1:
        if caps[0] is None or n <= caps[0]:
            yield (n,)
        return
    most = n if caps[0] is None else min(n, caps[0])
    for own in range(most + 1):
        for rest in all_splits(n - own, caps[1:]):
            yield (own, *rest)


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    k, n = draw(st.integers(1, 4)), draw(st.integers(0, 7))
    # Both round numbers, of which many are equal, and any others.
    seconds = st.one_of(st.integers(0, 4).map(float), st.floats(0, 10, allow_subnormal=False))
    steps = draw(st.lists(seconds, min_size=k, max_size=k))
    caps = st.lists(st.one_of(st.none(), st.integers(0, 7)), min_size=k, max_size=k)
    return {
        "n": n,
        "fixed": draw(st.lists(seconds, min_size=k, max_size=k)),
        "per_sample": draw(st.lists(seconds, min_size=k, max_size=k)),
        "overhead": [sum(steps[: i + 1]) for i in range(k)],
        "caps": draw(caps),
    }


@given(problems())
def test_no_split_is_better(problem: dict[str, Any]) -> None:
    n, caps, costs = problem["n"], problem["caps"], ("fixed", "per_sample", "overhead")
    model = [problem[name] for name in costs]
    splits = list(all_splits(n, caps))
    if not splits:
        with pytest.raises(ValueError, match="expected room for"):
            best_active(**problem)
        return
    found = best_active(**problem)
    assert found in splits
    best = min(step_seconds(sizes, *model) for sizes in splits)
    assert step_seconds(found, *model) == best


@given(problems(), st.integers(0, 3))
def test_no_split_with_so_few_devices_is_better(problem: dict[str, Any], others: int) -> None:
    n, caps, fixed, per_sample = (problem[name] for name in ("n", "caps", "fixed", "per_sample"))
    splits = [s for s in all_splits(n, caps) if sum(map(bool, s[1:])) <= others]
    found = best_with(n, others, fixed, per_sample, caps)
    if not splits:
        assert found is None
        return
    assert found in splits

    def slowest(sizes: Sizes) -> float:
        return step_seconds(sizes, fixed, per_sample, [0.0] * len(fixed))

    assert slowest(found) == min(map(slowest, splits))


def test_who_is_left_out_is_decided_by_the_time_that_it_takes_exactly() -> None:
    """A moment later the third device would have more room than the second."""
    assert best_with(3, 1, [0, 0, 1 + 1e-6], [1, 0.5, 1e-9]) == (1, 2, 0)


def test_devices_that_hold_everybody_up_are_left_out() -> None:
    assert best_active(64, [0.0] * 4, [1.0, 1.0, 1.0, 100.0], [0.0] * 4) == (22, 21, 21, 0)
    assert best_active(64, [0.0] * 4, [9.0, 1.0, 1.0, 9.0], [0, 1, 2, 9])[3] == 0


def test_sixteen_devices_and_a_large_batch_take_no_time() -> None:
    sizes = best_active(4096, [0.1] * 16, [0.01] * 16, [0.2 * i for i in range(16)])
    assert sum(sizes) == 4096 and sizes[0] and not sizes[-1]


@given(
    st.dictionaries(st.integers(0, 6), st.floats(-5, 5), min_size=1),
)
def test_overheads_between_those_that_are_known_never_fall(known: dict[int, float]) -> None:
    overhead = between(known, 6)
    assert len(overhead) == 7
    assert all(a <= b + 1e-9 for a, b in pairwise(overhead))
    for i in known:  # the most that neither falls nor is above any that is known
        assert overhead[i] == pytest.approx(min(known[j] for j in known if j >= i))
