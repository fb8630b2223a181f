"""Four unequal GPUs, as they were published: their times for a ResNet-18, batch 512, split evenly.

On virtual time. The optimum is searched for here, in another way than the package does, and then
run: a step of those sizes is what the learnt split is held against.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import Callback, LightningModule
from support.oracle import trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import DataParallelStrategy

TABLE = (0.0818, 0.0815, 0.0854, 0.3929)
"""Seconds of a step with 128 samples, by the publication."""
BATCH, WIDTH, DEPTH, STEPS, BY = 512, 8, 24, 20, 15

Line = tuple[float, float]


def least_time(n: int, lines: Sequence[Line]) -> tuple[float, list[int]]:
    """The shortest time in which devices end n samples all together, and the sizes.

    Every possible end of a step is the end of some device with some number of samples. Of all those
    the earliest is searched until which all devices together have room for n samples.
    """

    def rooms(seconds: float) -> list[int]:
        return [max(m for m in range(n + 1) if at(line, m) <= seconds) for line in lines]

    ends = sorted({at(line, m) for line in lines for m in range(1, n + 1)})
    best = ends[bisect_left(ends, n, key=lambda end: sum(rooms(end)))]
    sizes = rooms(best)
    while sum(sizes) > n:
        sizes[max(range(len(sizes)), key=lambda k: at(lines[k], sizes[k]))] -= 1
    return max(map(at, lines, sizes)), sizes


def at(line: Line, samples: int) -> float:
    fixed, per_sample = line
    return fixed + per_sample * samples if samples else 0.0


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), min_size=2, max_size=3))
def test_the_search_is_exhaustive(lines: list[Line]) -> None:
    n = 8
    splits = [(a, b, n - a - b) for a in range(n + 1) for b in range(n + 1 - a)]
    times = [max(map(at, lines, sizes)) for sizes in splits if len(lines) == 3 or sizes[2] == 0]
    found, sizes = least_time(n, lines)
    assert found == min(times) and sum(sizes) == n


class Sines(LightningModule):
    """Ops that all take the same per sample and per launch, half as many forward as backward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.scale * batch[0]
        for _ in range(DEPTH):
            x = x.sin()
        return x.mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1e-3)


class Clock(Callback):
    """When each step was through, and its sizes."""

    def __init__(self) -> None:
        self.sizes: list[tuple[int, ...]] = []
        self._ends: list[torch.Event] = []

    def _mark(self) -> None:
        end = torch.Event("sim:0", enable_timing=True)
        end.record(torch.accelerator.current_stream("sim:0"))
        self._ends.append(end)

    def on_train_start(self, *args: Any) -> None:
        self._mark()

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self._mark()
        self.sizes.append(trainer.strategy.last_sizes)

    @property
    def seconds(self) -> list[float]:
        return [a.elapsed_time(b) / 1e3 for a, b in pairwise(self._ends)]


@pytest.fixture
def virtual(on: str) -> Iterator[None]:
    yield
    torch.sim.set_clock("wall")
    for k in range(8):
        torch.sim.set_speed(k)


def set_speeds(launches: float) -> list[Line]:
    """Gives devices the table's speeds; so much of it is a step's launches. Returns their lines."""
    module, x = Sines().to("sim:7"), torch.ones(BATCH // 4, WIDTH, device="sim:7")

    def taken(**speed: float) -> float:
        torch.sim.set_speed(7, **speed)
        before = torch.sim.busy_seconds(7)
        module.training_step([x], 0).backward()
        module.zero_grad()
        return float(torch.sim.busy_seconds(7) - before) / 1e-9

    taken(seconds_per_op=1e-9)  # what is allocated once
    ops, elements = taken(seconds_per_op=1e-9), taken(seconds_per_element=1e-9)
    torch.sim.set_speed(7)
    for k, seconds in enumerate(TABLE):
        torch.sim.set_speed(
            k,
            seconds_per_op=launches * seconds / ops,
            seconds_per_element=(1 - launches) * seconds / elements,
        )
    return [(launches * s, (1 - launches) * s / (BATCH // 4)) for s in TABLE]


def fit(steps: int, **options: Any) -> Clock:
    torch.sim.set_clock("virtual")
    clock, strategy = Clock(), DataParallelStrategy(executor="threads", **options)
    job = trainer(4, strategy, max_steps=steps, max_epochs=-1, callbacks=[clock])
    job.fit(Sines(), DataLoader(TensorDataset(torch.ones(4 * BATCH, WIDTH)), BATCH))
    return clock


slow = pytest.mark.slow


@pytest.mark.sim_only("GPUs cannot be given a speed.")
@pytest.mark.parametrize(
    ("split", "launches"),
    [
        ("adaptive", 0.0),
        ("auto", 0.0),
        ("adaptive", 0.1),
        pytest.param("auto", 0.1, marks=slow),
        pytest.param("adaptive", 0.3, marks=slow),
        pytest.param("auto", 0.3, marks=slow),
    ],
)
def test_the_published_table_is_within_2_percent_of_the_optimum_by_step_15(
    split: str, launches: float, virtual: None
) -> None:
    lines = set_speeds(launches)
    least, best = least_time(BATCH, lines)
    optimum = fit(4, split=lambda n, devices: best).seconds[-1]
    assert optimum >= least  # which leaves out what the root does for the others
    learnt = fit(STEPS, split=split)
    print(
        f"\n{split}, launches {launches:.0%}: at least {least * 1e3:.1f} ms, {best} takes", end=" "
    )
    print(f"{optimum * 1e3:.1f} ms; step, sizes, ms, beyond that of the best sizes")
    for step, (sizes, s) in enumerate(zip(learnt.sizes, learnt.seconds, strict=True)):
        print(f"{step:4} {sizes!s:22} {s * 1e3:7.1f} {s / optimum - 1:+8.2%}")
    assert math.isclose(learnt.seconds[1], max(TABLE), rel_tol=0.02)  # split evenly
    assert max(learnt.seconds[BY:]) <= 1.02 * optimum
    if launches == 0:
        assert max(learnt.seconds[BY:]) <= 1.02 * least
