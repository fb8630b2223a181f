"""split="auto": one device's numbers whoever works, and as many devices as are fastest.

Times are numbers that the tests feed: none is measured here.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchmetrics
from lightning.pytorch import Callback
from support import device_kinds
from support.oracle import ByHand, Classifier, assert_same, loader, run, trainer
from torch import Tensor, nn

from lightning_dp import DataParallel, DataParallelMonitor, DataParallelStrategy
from lightning_dp.auto_split import AutoMode
from lightning_dp.parallel.split import Auto, StepUsage
from lightning_dp.parallel.split.learning import FIRST_ROUND, LONGEST_ROUND, DeviceCountTuner

pytestmark = pytest.mark.usefixtures("one_thread")

ALL = 4

Model = tuple[list[float], list[float]]
"""Seconds per sample of each device, and what each further device adds to a step."""


def trained(
    split: Auto,
    model: Model,
    n: int,
    steps: int,
    noise: Callable[[], float] = lambda: 1.0,
    **usage: Any,
) -> list[tuple[int, ...]]:
    """The sizes of steps on devices of numbers."""
    seen = []
    for _ in range(steps):
        is_timed = split.begin("training_step", n)
        sizes = split(n)
        busy = tuple(m * s for m, s in zip(sizes, model[0], strict=True))
        split.learn(StepUsage(sizes, busy, max(busy), **usage))
        if is_timed:
            split.end((max(busy) + model[1][sum(map(bool, sizes[1:]))]) * noise())
        seen.append(sizes)
    return seen


@pytest.mark.parametrize(
    ("per_sample", "overhead", "expected"),
    [
        ([1, 1, 1, 1], [0, 1, 2, 3], (16, 16, 16, 16)),
        ([1, 1, 1, 1], [0, 40, 60, 90], (64, 0, 0, 0)),
        ([1, 1, 1, 1], [0, 9, 30, 45], (32, 32, 0, 0)),
        ([1, 1, 1, 8], [0, 1, 2, 3], (21, 21, 20, 2)),
    ],
)
def test_as_many_devices_work_as_are_fastest(per_sample: Any, overhead: Any, expected: Any) -> None:
    split = Auto(4)
    seen = trained(split, (per_sample, overhead), 64, 60)
    assert seen[0] == (16,) * 4 and set(seen[-10:]) == {expected}


@pytest.mark.parametrize("seed", range(4))
def test_noise_decides_little(seed: int) -> None:
    draw = random.Random(seed)
    model: Model = ([1.0] * 4, [0, 0, 0, 10])  # two devices take 1.23 times as long as all
    seen = trained(Auto(4), model, 64, 2000, noise=lambda: 1 + draw.expovariate(40))
    assert {*seen[20:FIRST_ROUND]} == {(16,) * 4} and seen.count((16,) * 4) > 0.9 * 2000


def test_a_machine_that_has_changed_is_followed() -> None:
    split = Auto(4)
    many: Model = ([1.0] * 4, [0, 1, 2, 3])
    few: Model = ([1.0] * 4, [0, 200, 200, 200])
    assert trained(split, many, 64, 50)[-1] == (16,) * 4
    assert trained(split, few, 64, FIRST_ROUND)[-1] == (64, 0, 0, 0)
    trained(split, few, 64, 5 * LONGEST_ROUND)
    assert trained(split, many, 64, LONGEST_ROUND)[-1] == (16,) * 4


@pytest.mark.parametrize(("capacity", "fits"), [(10_000, False), (50_000, True)])
def test_a_batch_that_would_not_fit_the_root_never_goes_there(capacity: int, fits: bool) -> None:
    usage = {"peak_bytes": (1000 + 16 * 200,) * 4, "start_bytes": (1000,) * 4}
    split = Auto(4, lambda: [capacity] * 4)
    seen = trained(split, ([1.0] * 4, [0, 90, 90, 90]), 64, 40, **usage)
    assert ((64, 0, 0, 0) in seen) == fits
    split.use_all(evenly=True)
    assert split(13) == (4, 3, 3, 3)


# In a Trainer: numbers do not depend on who works

EXACT = {"atol": 1e-10}
TURNS = [ALL, 1, 1, 2, 1, ALL, ALL, 1, 2, 2]


@pytest.fixture
def paths(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many steps were Lightning's own, and how many the engine's."""
    seen, step = Counter[str](), DataParallelStrategy._step

    def counted(self: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        output = step(self, method, *args, **kwargs)
        if isinstance(self._mode, AutoMode):
            is_root = any(self.last_sizes) and not any(self.last_sizes[1:])
            seen["alone" if self._mode.is_alone else "root" if is_root else "several"] += 1
        return output

    monkeypatch.setattr(DataParallelStrategy, "_step", counted)
    return seen


@pytest.fixture
def switching(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of devices changes from step to step."""

    def next_step(self: Any, can: Callable[[int], bool]) -> tuple[int, bool]:
        count = min(next(vars(self).setdefault("turns", itertools.cycle(TURNS))), self._all)
        return (count if can(count) else self._all), True

    monkeypatch.setattr(DeviceCountTuner, "next_step", next_step)


class Stateful(Classifier):
    """Metrics, lists and other state on self, and logs of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=3)
        self.seen: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(batch[1])
        self.accuracy(self(batch[0]), batch[1])
        self.log("train/acc", self.accuracy, on_step=True, on_epoch=True, batch_size=len(batch[1]))
        return super().training_step(batch, batch_idx)


class SkipsSome(Stateful):
    """Some batches have no loss, the last ones before the optimizer's step among them."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx in (1, 3) else loss


class MovesTargets(Classifier):
    def loss(self, batch: Any) -> Tensor:
        outputs = self(batch[0])
        return nn.functional.cross_entropy(outputs, batch[1].to(outputs.device))


class WithClosures(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), 0.01, max_iter=3)


class Stateful64(ByHand, Stateful):
    """By hand."""


CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "step": (Stateful, {}, {}),
    "forward, batch stays": (MovesTargets, {"mode": "forward", "move_batch": False}, {}),
    "manual": (Stateful64, {}, {}),
    "accumulation, some without a loss": (SkipsSome, {}, {"accumulate_grad_batches": 2}),
    "output elsewhere": (Stateful, {"output_device": "cpu"}, {}),
    "closures": (WithClosures, {}, {}),
}


@pytest.mark.parametrize(
    ("name", "on"),
    [(name, "cpu") for name in CASES if "output_device" not in CASES[name][1]]
    + [
        (name, kind)
        for name in ("forward, batch stays", "output elsewhere")
        for kind in device_kinds.kinds
        if kind == "sim"
    ],
    indirect=["on"],
)
@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.usefixtures("switching")
def test_every_mode_has_one_devices_numbers(name: str, on: str, paths: Counter[str]) -> None:
    make, options, kwargs = CASES[name]
    kwargs = {"precision": "64-true", **kwargs}
    result = run(make, 4, strategy={"split": "auto", **options}, **kwargs)
    expected = run(make, 1, **kwargs)
    assert_same(result, expected, **EXACT)
    if issubclass(make, Stateful):
        kept = [torch.cat(job.module.seen).tolist() for job in (result, expected)]
        assert kept[0] == kept[1]
    stays = on != "cpu" and ("output_device" in options or not options.get("move_batch", True))
    assert paths["several"] and paths["root" if stays else "alone"], paths
    assert not stays or not paths["alone"]


@pytest.mark.usefixtures("switching")
def test_usage_and_the_monitor_count_what_the_root_has_done_alone(paths: Counter[str]) -> None:
    monitor, strategy = DataParallelMonitor(), DataParallelStrategy(split="auto")
    sizes: list[tuple[int, ...]] = []

    class Seen(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            sizes.append(trainer.strategy.last_sizes)

    job = trainer(4, strategy, max_steps=20, max_epochs=-1, callbacks=[monitor, Seen()])
    job.fit(Classifier(), loader(53), loader(8))
    expected = [sum(column) for column in zip(*sizes, strict=True)]
    assert [usage.samples for usage in strategy.usage] == expected and paths["alone"]
    assert list(monitor.total.samples) == expected and monitor.total.steps == 20
    assert all(usage.busy_seconds > 0 for usage in strategy.usage)


@pytest.mark.usefixtures("switching")
def test_deterministic_algorithms_leave_no_choice_and_the_first_step_is_checked(
    paths: Counter[str],
) -> None:
    strategy = DataParallelStrategy(split="auto")
    trainer(4, strategy, max_epochs=2, deterministic=True).fit(Classifier(), loader(), loader())
    assert set(paths) == {"several"} and strategy.last_sizes == (1, 1, 1, 0)
    torch.use_deterministic_algorithms(False)
    strategy = DataParallelStrategy(split="auto", check_first_step=True)
    trainer(4, strategy, max_epochs=3).fit(Classifier(), loader(), loader())
    assert strategy.first_step["training_step"].is_same and paths["alone"]


class WritesThroughData(Classifier):
    """Writes to weights after each batch, so that no version counts it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()), requires_grad=False)

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * self.scale

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step == 5:  # of the root alone; the next one is of all
            self.scale.data.fill_(0.5)


@device_kinds.on_separate
@pytest.mark.usefixtures("switching", "unchecked")
def test_what_is_written_while_the_root_is_alone_reaches_all(on: str) -> None:
    options: dict[str, Any] = {"max_epochs": 4, "data": lambda: loader(75), "precision": "64-true"}
    result = run(WritesThroughData, 4, strategy={"split": "auto"}, **options)
    assert_same(result, run(WritesThroughData, 1, **options), **EXACT)


def test_the_drop_in_refuses_it() -> None:
    with pytest.raises(ValueError, match=r"^split: expected another one than 'auto'"):
        DataParallel(nn.Linear(2, 2), ["cpu", "cpu"], split="auto")
