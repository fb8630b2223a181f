"""Splits that learn from real steps: of simulated devices with speeds of their own."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from oracle import Classifier, assert_same, loader, run, trainer

from lightning_dp import DataParallelStrategy
from lightning_dp.parallel.split.arithmetic import Sizes, minimax

pytestmark = pytest.mark.sim_only("GPUs cannot be given a speed.")
SECONDS = 2e-7
"""Per element of an op's output, on a fast device."""


@pytest.fixture
def speeds(on: str) -> Iterator[Any]:
    """Sets the seconds per element of simulated devices."""

    def set_all(*factors: float) -> None:
        for i, factor in enumerate(factors):
            torch.sim.set_speed(i, seconds_per_element=SECONDS * factor)

    yield set_all
    set_all(*[0.0] * 8)


class Sizes64(Callback):
    """The sizes of every full batch, and a change of speed in the middle."""

    def __init__(self, at: int = -1, change: Any = None) -> None:
        self.sizes: list[Sizes] = []
        self._at, self._change = at, change

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if len(self.sizes) == self._at:
            self._change()
        self.sizes.append(trainer.strategy.last_sizes)


def fit(callback: Callback, steps: int, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    job = trainer(
        4,
        DataParallelStrategy(split="adaptive", executor="threads"),
        max_steps=steps,
        max_epochs=-1,
        callbacks=[callback],
        **kwargs,
    )
    job.fit(Classifier(), loader(64 * 8, 64), loader(8))
    return job


def line() -> tuple[float, float]:
    """What a step takes on a fast device: fixed seconds, and seconds per sample."""
    module = Classifier().to("sim:7")
    torch.sim.set_speed(7, seconds_per_element=SECONDS)

    def seconds(n: int) -> float:
        module.zero_grad()
        x, y = torch.randn(n, 10).to("sim:7"), torch.zeros(n, dtype=torch.long).to("sim:7")
        before = torch.sim.busy_seconds(7)
        module.loss((x, y)).backward()
        return float(torch.sim.busy_seconds(7) - before)

    per_sample = (seconds(32) - seconds(16)) / 16
    return seconds(16) - 16 * per_sample, per_sample


def excess(sizes: Sizes, factors: list[float]) -> float:
    """How much longer a step takes than with the best split, relative to that."""
    fixed, per_sample = line()
    times = [[fixed * f for f in factors], [per_sample * f for f in factors]]
    best = minimax(64, *times)
    ends = [[a + b * n for n, a, b in zip(s, *times, strict=True)] for s in (sizes, best)]
    return max(ends[0]) / max(ends[1]) - 1


def test_a_slow_device_gets_less_within_10_steps(speeds: Any) -> None:
    speeds(1, 1, 1, 4)
    seen = Sizes64()
    fit(seen, 12)
    assert seen.sizes[0] == (16, 16, 16, 16)
    assert all(excess(sizes, [1, 1, 1, 4]) <= 0.05 for sizes in seen.sizes[10:]), seen.sizes


def test_a_device_that_slows_down_is_followed_within_20_steps(speeds: Any) -> None:
    speeds(1, 1, 1, 1)
    seen = Sizes64(at=10, change=lambda: speeds(1, 3, 1, 1))
    fit(seen, 32)
    assert excess(seen.sizes[-1], [1, 3, 1, 1]) <= 0.05


def test_equal_devices_stay_even(speeds: Any) -> None:
    speeds(1, 1, 1, 1)
    seen = Sizes64()
    fit(seen, 30)
    assert all(max(sizes) <= 17 and min(sizes) >= 15 for sizes in seen.sizes)


def test_what_was_learnt_goes_into_the_checkpoint(speeds: Any, tmp_path: Path) -> None:
    speeds(1, 1, 1, 4)
    job = fit(Sizes64(), 16)
    job.save_checkpoint(tmp_path / "last.ckpt")
    seen = Sizes64()
    resumed = trainer(
        4, DataParallelStrategy(split="adaptive"), max_steps=18, max_epochs=-1, callbacks=[seen]
    )
    resumed.fit(Classifier(), loader(64 * 8, 64), loader(8), ckpt_path=tmp_path / "last.ckpt")
    assert excess(seen.sizes[0], [1, 1, 1, 4]) <= 0.05


def test_it_trains_as_one_device_does(speeds: Any) -> None:
    speeds(1, 2, 1, 4)
    result = run(Classifier, 4, strategy={"split": "adaptive"})
    assert_same(result, run(Classifier, 1), atol=1e-6, rtol=1e-5)
