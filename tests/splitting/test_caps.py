"""What fits is learnt from what failed, until a split is found or the largest batch is known."""

from hypothesis import given
from hypothesis import strategies as st

from lightning_dp.parallel.split.arithmetic import even
from lightning_dp.parallel.split.planner import Capacity

limits = st.lists(st.integers(0, 40), min_size=1, max_size=6)


def run(capacity: Capacity, sizes: tuple[int, ...], room: list[int]) -> bool:
    """A step on devices with so much room: what it tells is noted."""
    failed = [k for k, size in enumerate(sizes) if size > room[k]]
    if failed:
        capacity.record_oom(sizes, failed)
    else:
        capacity.record_success(sizes)
    return not failed


@given(limits, st.integers(1, 100))
def test_a_split_that_fits_is_found_if_there_is_one(room: list[int], n: int) -> None:
    capacity = Capacity(len(room))
    found = False
    while not found and capacity.has_room(n):
        sizes = capacity.within(even(n, len(room)))
        assert sum(sizes) == n
        found = run(capacity, sizes, room)
    while not found and (sizes := capacity.trial(n)) is not None:
        run(capacity, sizes, room)
    if not found:
        assert sum(map(min, capacity.fits, room)) == sum(capacity.fits)
        found = sum(capacity.fits) >= n
    assert found == (sum(room) >= n)
    if not found:
        assert sum(capacity.fits) == sum(room)


@given(limits, st.integers(1, 100), st.integers(0, 5))
def test_what_fits_is_left_as_wanted(room: list[int], n: int, k: int) -> None:
    capacity = Capacity(len(room))
    wanted = even(n, len(room))
    assert capacity.within(wanted) == wanted
    k %= len(room)
    capacity.record_oom((100,) * len(room), [k])
    caps = capacity.caps or []
    assert [cap for i, cap in enumerate(caps) if i != k] == [None] * (len(room) - 1)
    if wanted[k] <= (caps[k] or 0):
        assert capacity.within(wanted) == wanted


def test_the_others_get_more_in_proportion() -> None:
    capacity = Capacity(4)
    capacity.record_oom((32, 16, 16, 0), [0])
    assert capacity.within((32, 16, 16, 0)) == (28, 18, 18, 0)


def test_a_device_that_was_to_have_nothing_gets_something_only_if_nobody_else_has_room() -> None:
    capacity = Capacity(3)
    capacity.record_oom((8, 8, 0), [0, 1])
    assert capacity.within((8, 8, 0)) == (7, 7, 2)


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
    assert capacity.within((20, 20))[0] < 20
    assert capacity.fits == (19, 20)
