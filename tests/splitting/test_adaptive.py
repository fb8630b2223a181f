"""Adaptive splitting finds the best split, follows drift, and rests where all is well."""

import random
from collections.abc import Callable

import pytest

from lightning_dp.parallel.split.adaptive import Adaptive
from lightning_dp.parallel.split.arithmetic import Sizes, even, minimax
from lightning_dp.parallel.split.policies import split_policy
from lightning_dp.parallel.split.usage import StepUsage

Speeds = list[tuple[float, float]]
"""Of each device `(fixed, per_sample)`, in seconds."""


def seconds(
    sizes: Sizes, speeds: Speeds, noise: Callable[[], float] = lambda: 0.0
) -> tuple[float, ...]:
    return tuple(
        (fixed + per_sample * n) * (1 + noise()) if n else 0.0
        for n, (fixed, per_sample) in zip(sizes, speeds, strict=True)
    )


def run(split: Adaptive, n: int, speeds: Speeds, steps: int, **kwargs: Callable[[], float]) -> None:
    for _ in range(steps):
        sizes = split(n)
        split.learn(StepUsage(sizes, seconds(sizes, speeds, **kwargs)))


def excess(split: Adaptive, n: int, speeds: Speeds) -> float:
    """How much longer a step takes than with the best of all splits, relative to that."""
    best = minimax(n, *map(list, zip(*speeds, strict=True)))
    return max(seconds(split(n), speeds)) / max(seconds(best, speeds)) - 1


SLOW_LAST = [(0.0, 0.01)] * 3 + [(0.0, 0.04)]
DEVICES = {
    "one at a quarter": SLOW_LAST,
    "fixed costs": [(0.05, 0.01)] * 3 + [(0.2, 0.04)],
    "all different": [(0.01, 0.01), (0.05, 0.02), (0.02, 0.03), (0.1, 0.005)],
    "two": [(0.0, 0.01), (0.03, 0.02)],
    "ten times": [(0.0, 0.001), (0.0, 0.01)],
}


@pytest.mark.parametrize("name", DEVICES)
def test_from_a_cold_start_it_is_near_the_best_split_within_10_steps(name: str) -> None:
    split = Adaptive(len(DEVICES[name]))
    run(split, 64, DEVICES[name], 10)
    assert excess(split, 64, DEVICES[name]) <= 0.05


def test_within_15_steps_it_is_near_the_best_split_of_nearly_any_devices() -> None:
    """There are devices for which it takes longer: the times of two near sizes tell little."""
    draw, above = random.Random(0), []
    for _ in range(200):
        speeds = [(draw.uniform(0, 100), draw.uniform(0.5, 6)) for _ in range(draw.randint(2, 8))]
        n, split = draw.choice([64, 128, 512, 1000]), Adaptive(len(speeds))
        run(split, n, speeds, 15)
        best = max(seconds(minimax(n, *map(list, zip(*speeds, strict=True))), speeds))
        one_sample = max(per_sample for _, per_sample in speeds) / best
        above.append(excess(split, n, speeds) - one_sample)
    assert sum(each > 0.02 for each in above) <= 4 and max(above) <= 0.1, sorted(above)[-5:]


def test_what_a_step_takes_with_far_fewer_samples_is_no_change_of_the_device() -> None:
    """What is fixed in a step shows only there, and both sizes together tell it."""
    split = Adaptive(4)
    speeds = [(24.5, 0.447)] * 3 + [(117.9, 2.149)]
    run(split, 512, speeds, 5)
    assert split(512) == (171, 171, 170, 0)


def test_a_device_of_much_less_speed_stays_one_however_noisy_the_times_are() -> None:
    draw, split = random.Random(0), Adaptive(4)
    for step in range(300):
        assert step < 15 or excess(split, 512, SLOW_LAST) < 0.25
        run(split, 512, SLOW_LAST, 1, noise=lambda: draw.uniform(0, 0.2))


def test_it_stays_there() -> None:
    split = Adaptive(4)
    run(split, 64, SLOW_LAST, 10)
    for _ in range(200):
        run(split, 64, SLOW_LAST, 1)
        assert excess(split, 64, SLOW_LAST) <= 0.05


@pytest.mark.parametrize("factor", [1.5, 4.0, 0.3])
def test_it_recovers_within_20_steps_after_a_device_has_changed(factor: float) -> None:
    split, speeds = Adaptive(4), list(SLOW_LAST)
    run(split, 64, speeds, 30)
    fixed, per_sample = speeds[1]
    speeds[1] = (fixed * factor, per_sample * factor)
    run(split, 64, speeds, 20)
    assert excess(split, 64, speeds) <= 0.05


@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_equal_devices_stay_within_one_sample_of_even(noise: float) -> None:
    draw = random.Random(0)
    split = Adaptive(4)
    for _ in range(300):
        sizes = split(64)
        assert all(abs(a - b) <= 1 for a, b in zip(sizes, even(64, 4), strict=True))
        times = seconds(sizes, [(0.02, 0.01)] * 4, noise=lambda: draw.uniform(0, noise))
        split.learn(StepUsage(sizes, times))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("per_sample", [0.0, 0.0001])
def test_where_times_are_noise_it_stays_even(seed: int, per_sample: float) -> None:
    """Steps whose time is Python's, and not the samples', on a busy machine."""
    draw = random.Random(seed)
    split, steps = Adaptive(4), 400
    uneven = 0
    for _ in range(steps):
        sizes = split(64)
        uneven += max(sizes) - min(sizes) > 2
        times = seconds(sizes, [(0.01, per_sample)] * 4, noise=lambda: draw.expovariate(2))
        split.learn(StepUsage(sizes, times))
    assert uneven / steps <= 0.1


def test_one_odd_step_moves_nothing_much() -> None:
    split = Adaptive(2)
    run(split, 20, [(0.0, 0.01)] * 2, 10)
    split.learn(StepUsage((10, 10), (0.1, 1.0)))
    run(split, 20, [(0.0, 0.01)] * 2, 5)
    assert split(20) == (10, 10)


def test_batches_of_other_sizes_are_split_by_what_is_known() -> None:
    split = Adaptive(4)
    run(split, 64, SLOW_LAST, 10)
    assert sum(split(7)) == 7 and excess(split, 7, SLOW_LAST) == 0
    assert split(0) == (0, 0, 0, 0)


def test_a_device_that_became_fast_again_is_found() -> None:
    speeds = [(0.0, 0.001), (0.5, 0.1)]
    split = Adaptive(2)
    run(split, 8, speeds, 20)
    assert split(8) == (8, 0)
    run(split, 8, [(0.0, 0.001)] * 2, 200)
    assert max(split(8)) <= 5


def test_what_was_learnt_is_saved_and_restored() -> None:
    split = Adaptive(4)
    run(split, 64, SLOW_LAST, 12)
    other = Adaptive(4)
    other.load_state_dict(split.state_dict())
    assert excess(other, 64, SLOW_LAST) <= 0.05
    Adaptive(2).load_state_dict(split.state_dict())  # of other devices: nothing is taken


def test_caps_are_kept_and_the_others_share_the_rest() -> None:
    split = Adaptive(4)
    caps = [None, 8, None, None]
    for _ in range(20):
        sizes = split(64, caps)
        assert sizes[1] <= 8 and sum(sizes) == 64
        split.learn(StepUsage(sizes, seconds(sizes, SLOW_LAST)))
    best = minimax(64, *map(list, zip(*SLOW_LAST, strict=True)), caps=caps)
    assert max(seconds(split(64, caps), SLOW_LAST)) <= 1.05 * max(seconds(best, SLOW_LAST))


def test_it_begins_with_given_shares_and_learns_from_there() -> None:
    split = split_policy("adaptive", [1, 2, 3], ["cpu"] * 3)
    assert split(12) == (2, 4, 6)
    run(split, 12, [(0.0, 0.01)] * 3, 15)
    assert split(12) == (4, 4, 4)
    right = split_policy("adaptive", [3, 1], ["cpu"] * 2)
    run(right, 8, [(0.0, 0.01), (0.0, 0.03)], 100)
    assert right(8) == (6, 2), "no reason to leave what was right"


def test_shares_to_begin_with_leave_no_device_out() -> None:
    with pytest.raises(ValueError, match=r"weights: expected numbers above 0 .*got \[0, 1\]"):
        split_policy("adaptive", [0, 1], ["cpu"] * 2)
    with pytest.raises(ValueError, match="weights: expected 3 numbers, one per device, got 2"):
        split_policy("adaptive", [1, 1], ["cpu"] * 3)
