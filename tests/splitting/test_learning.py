"""Splits that learn: by time they find the best split and follow drift, by memory they level it.

First on devices of numbers, then in a Trainer on simulated devices of given speeds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import Callback, LightningModule
from support.oracle import Classifier, assert_same, loader, run, trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import DataParallel, DataParallelStrategy
from lightning_dp.parallel.split import Sizes, StepUsage, even, split_policy
from lightning_dp.parallel.split.learning import Adaptive, Memory
from lightning_dp.parallel.split.optimal import minimax

Speeds = list[tuple[float, float]]
"""Of each device `(fixed, per_sample)`, in seconds."""

Noise = Callable[[], float]


def seconds(sizes: Sizes, speeds: Speeds, noise: Noise = lambda: 0.0) -> tuple[float, ...]:
    return tuple(
        (fixed + per_sample * n) * (1 + noise()) if n else 0.0
        for n, (fixed, per_sample) in zip(sizes, speeds, strict=True)
    )


def steps(split: Adaptive, n: int, speeds: Speeds, count: int, **kwargs: Noise) -> list[Sizes]:
    seen = []
    for _ in range(count):
        seen.append(sizes := split(n))
        split.learn(StepUsage(sizes, seconds(sizes, speeds, **kwargs)))
    return seen


def excess(sizes: Sizes, speeds: Speeds) -> float:
    """How much longer a step takes than with the best of all splits, relative to that."""
    best = minimax(sum(sizes), *map(list, zip(*speeds, strict=True)))
    return max(seconds(sizes, speeds)) / max(seconds(best, speeds)) - 1


SLOW_LAST: Speeds = [(0.0, 0.01)] * 3 + [(0.0, 0.04)]


@pytest.mark.parametrize(
    "speeds",
    [
        pytest.param(SLOW_LAST, id="one at a quarter"),
        pytest.param([(0.05, 0.01)] * 3 + [(0.2, 0.04)], id="fixed costs"),
        pytest.param([(0.01, 0.01), (0.05, 0.02), (0.02, 0.03), (0.1, 0.005)], id="all different"),
        pytest.param([(0.0, 0.001), (0.0, 0.01)], id="ten times"),
    ],
)
def test_from_a_cold_start_it_is_near_the_best_split_within_10_steps_and_stays(
    speeds: Speeds,
) -> None:
    split = Adaptive(len(speeds))
    steps(split, 64, speeds, 10)
    assert max(excess(sizes, speeds) for sizes in steps(split, 64, speeds, 39)) <= 0.05
    assert sum(split(7)) == 7 and split(0) == (0,) * len(speeds)


@pytest.mark.parametrize("factor", [1.5, 4.0, 0.3])
def test_it_recovers_within_20_steps_after_a_device_has_changed(factor: float) -> None:
    split, speeds = Adaptive(4), list(SLOW_LAST)
    steps(split, 64, speeds, 30)
    speeds[1] = (speeds[1][0] * factor, speeds[1][1] * factor)
    assert excess(steps(split, 64, speeds, 21)[-1], speeds) <= 0.05


@pytest.mark.parametrize(
    ("per_sample", "fixed", "noise", "share"),
    [
        (0.01, 0.02, lambda draw: draw.uniform(0, 0.03), 0.0),
        (0.0, 0.01, lambda draw: draw.expovariate(2), 0.1),  # the time is Python's
        (0.0001, 0.01, lambda draw: draw.expovariate(2), 0.1),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_equal_devices_stay_even_however_noisy_the_times_are(
    per_sample: float, fixed: float, noise: Any, share: float, seed: int
) -> None:
    draw = random.Random(seed)
    seen = steps(Adaptive(4), 64, [(fixed, per_sample)] * 4, 300, noise=lambda: noise(draw))
    assert sum(max(sizes) - min(sizes) > 2 for sizes in seen) <= share * len(seen)


def test_a_device_without_samples_is_used_again_when_it_has_become_fast() -> None:
    split, slow = Adaptive(2), [(0.0, 0.01), (1.0, 0.5)]
    assert steps(split, 20, slow, 50)[-1] == (20, 0)
    seen = steps(split, 20, slow, 200)
    assert {*seen} == {(20, 0), (19, 1)} and seen.count((19, 1)) == 2
    assert excess(steps(split, 20, [(0.0, 0.01)] * 2, 120)[-1], [(0.0, 0.01)] * 2) <= 0.05


def test_it_begins_with_given_shares_and_learns_from_there() -> None:
    split = split_policy("adaptive", [1, 2, 3], ["cpu"] * 3)
    assert split(12) == (2, 4, 6)
    assert steps(split, 12, [(0.0, 0.01)] * 3, 16)[-1] == (4, 4, 4)
    right = split_policy("adaptive", [3, 1], ["cpu"] * 2)
    assert {*steps(right, 8, [(0.0, 0.01), (0.0, 0.03)], 100)} == {(6, 2)}


# By memory


def peaks(sizes: Sizes, fixed: list[int], per_sample: int) -> tuple[int, ...]:
    return tuple(a + per_sample * n for n, a in zip(sizes, fixed, strict=True))


def learn(split: Memory, n: int, fixed: list[int], per_sample: int, added: int, count: int) -> None:
    """Steps on devices whose fixed bytes are there before it, but for some that it adds."""
    before = tuple(bytes_ - added for bytes_ in fixed)
    for _ in range(count):
        sizes = split(n)
        busy = (1.0,) * len(sizes)
        split.learn(StepUsage(sizes, busy, 1.0, peaks(sizes, fixed, per_sample), before))


@given(
    st.lists(st.integers(1000, 3000), min_size=2, max_size=6),
    st.integers(20, 100),
    st.integers(0, 1000),
    st.integers(0, 6).map(lambda i: i * 500),
)
def test_the_fullest_device_has_the_most_free_within_a_sample_or_two_percent(
    fixed: list[int], per_sample: int, added: int, smaller: int
) -> None:
    capacities = [20_000] * (len(fixed) - 1) + [20_000 - smaller]
    split, n = Memory(len(fixed), lambda: capacities), 64 * len(fixed)

    def least_free(sizes: Sizes) -> int:
        used = peaks(sizes, fixed, per_sample)
        return min(c - peak for c, peak in zip(capacities, used, strict=True))

    assert split(n) == even(n, len(fixed))
    learn(split, n, fixed, per_sample, added, 14)
    used = [a - c for a, c in zip(fixed, capacities, strict=True)]
    best = minimax(n, used, [per_sample] * len(fixed))
    assert sum(split(n)) == n
    slack = max(per_sample, 0.02 * max(peaks(split(n), fixed, per_sample)))
    assert least_free(split(n)) >= least_free(best) - slack - 1


def test_the_heaviest_batches_count() -> None:
    """As many samples of other lengths: now and then a batch takes three times the memory."""
    split = Memory(2, lambda: [10_000] * 2)
    for step in range(40):
        learn(split, 20, [2000, 1000], 150 if step % 4 == 3 else 50, 0, 1)
    first, second = peaks(split(20), [2000, 1000], 150)
    assert abs(first - second) <= 150


def test_replicas_on_one_device_share_what_it_has() -> None:
    split = split_policy("memory", None, ["a", "b", "b"], lambda: [5000] * 3)
    split.learn(StepUsage((4, 3, 3), (1.0,) * 3, 1.0, (4000, 100, 100), (1000,) * 3))
    assert split(10) == (4, 3, 3)


# In a Trainer


class LanguageModel(Classifier):
    """Predicts each next word of many; what takes memory is the scores of all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(512, 32), nn.Linear(32, 512))

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch[0]).transpose(1, 2), batch[1])

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        scores: Tensor = self(batch[0])[:, -1, :50]
        return scores


def words() -> DataLoader[Any]:
    text = torch.randint(0, 512, (50, 17), generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(text[:, :-1], text[:, 1:]), batch_size=25)


on_sim = pytest.mark.on("sim")  # GPUs cannot be given a speed, nor a memory for a test.
SECONDS = 2e-7
"""Per element of an op's output, on a fast device."""


def set_speeds(*factors: float) -> None:
    for i, factor in enumerate(factors):
        torch.sim.set_speed(i, seconds_per_element=SECONDS * factor)


@pytest.fixture
def speeds(on: str) -> Iterator[None]:
    torch.sim.set_clock("virtual")
    yield
    torch.sim.set_clock("wall")
    set_speeds(*[0.0] * 8)


@on_sim
@pytest.mark.parametrize("split", ["adaptive", "memory"])
def test_it_trains_as_one_device_does(split: str, speeds: None, room: Any) -> None:
    make, data = Classifier, loader
    for device in range(4):  # has the same left, whatever earlier tests have in use there
        room(device, 2**30)
    if split == "adaptive":
        set_speeds(1, 2, 1, 4)
    else:
        make, data = LanguageModel, words
    several = run(make, 4, strategy={"split": split}, data=data, precision="64-true")
    samples = [usage.samples for usage in several.trainer.strategy.usage]
    assert samples[0 if split == "memory" else 3] == min(samples) < max(samples)
    set_speeds(*[0.0] * 4)
    assert_same(several, run(make, 1, data=data, precision="64-true"), atol=1e-8)


PUBLISHED = (0.0818, 0.0815, 0.0854, 0.3929)
"""Seconds that four GPUs were published to take for a quarter of 512 samples each."""


class Sines(LightningModule):
    """Ops that all take the same per sample."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.scale * batch[0]
        for _ in range(24):
            x = x.sin()
        return x.mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1e-3)


class Clock(Callback):
    """When each step was through."""

    def __init__(self) -> None:
        self._ends: list[torch.Event] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self._ends.append(torch.Event("sim:0", enable_timing=True))
        self._ends[-1].record(torch.accelerator.current_stream("sim:0"))

    def seconds(self) -> list[float]:
        return [a.elapsed_time(b) / 1e3 for a, b in pairwise(self._ends)]


@on_sim
@pytest.mark.parametrize("split", ["adaptive", "auto"])
def test_four_published_gpus_reach_the_optimum_in_a_few_steps(split: str, speeds: None) -> None:
    def fit(split: Any) -> list[float]:
        clock, strategy = Clock(), DataParallelStrategy(executor="threads", split=split)
        job = trainer(4, strategy, max_steps=22, max_epochs=-1, callbacks=[clock])
        job.fit(Sines(), DataLoader(TensorDataset(torch.ones(2048, 8)), 512))
        return clock.seconds()

    set_speeds(*[seconds / PUBLISHED[0] for seconds in PUBLISHED])
    best = minimax(512, [0.0] * 4, PUBLISHED)
    optimum, learnt = fit(lambda n, devices: best)[-1], fit(split)
    assert learnt[0] == pytest.approx(392.9 / 103.7 * optimum, rel=0.02)  # split evenly
    assert max(learnt[14 if split == "adaptive" else 17 :]) <= 1.02 * optimum


SHARED = "share one memory"


@pytest.mark.on("cpu")
@pytest.mark.parametrize(("split", "times"), [("memory", 1), ("even", 0)])
def test_replicas_on_the_cpu_are_told_once_that_there_is_nothing_to_learn(
    split: str, times: int, on: str, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = DataParallelStrategy(split=split)
    job = trainer(2, strategy, max_steps=3, max_epochs=-1)
    job.fit(Classifier(), loader(24, 8), loader(8))
    net = DataParallel(nn.Linear(4, 1), ["cpu", "cpu"], split=split)
    for _ in range(3):
        net(torch.ones(5, 4)).sum().backward()
    net.close()
    said = [r.getMessage() for r in caplog.records if SHARED in r.getMessage()]
    assert len(said) == 2 * times and not any("\n" in text for text in said)
    assert strategy.last_sizes == (4, 4) and net.last_sizes == (3, 2)
