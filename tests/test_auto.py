"""split="auto": one device's numbers whoever works, and as many devices as are fastest."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import test_conformance as conformance
import torch
import torchmetrics
from families import FAMILIES
from oracle import ByHand, Classifier, assert_same, devices_of, run
from torch import Tensor, nn

from lightning_dp.alone import AloneSteps
from lightning_dp.parallel.split.choice import Choice

pytestmark = pytest.mark.usefixtures("one_thread")

EXACT = {"atol": 1e-10}
ALL = -1
TURNS = [ALL, 0, 0, 1, 0, ALL, ALL, 0, 1, 1]


class Ways(Counter[str]):
    """How many steps of each kind were Lightning's own, and how many the engine's."""


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> Ways:
    """Counts steps."""
    seen, step = Ways(), AloneSteps.step

    def counted(self: Any, method: str, *args: Any) -> Any:
        output = step(self, method, *args)
        if self.is_alone:
            seen["alone"] += 1
        else:
            sizes = self._engine.last_sizes
            seen["root" if sizes[0] and not any(sizes[1:]) else "several"] += 1
        return output

    monkeypatch.setattr(AloneSteps, "step", counted)
    return seen


@pytest.fixture
def switching(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ways change from batch to batch, as fast as they never do by themselves."""
    turns = itertools.cycle(TURNS)

    def begin(self: Any, can: Callable[[int], bool], is_settled: Any) -> tuple[int, bool]:
        way = next(turns)
        most = self._most
        way = most if way == ALL else min(way, most)
        return (way if can(way) else most), True

    monkeypatch.setattr(Choice, "begin", begin)


def families() -> list[Any]:
    """Every family plain, and every option with a few; the rest is slow."""
    found = []
    for (i, option), (j, family) in itertools.product(
        enumerate(conformance.OPTIONS), enumerate(FAMILIES)
    ):
        own = conformance.OPTIONS[option]
        if "split" in own.strategy() or "weights" in own.strategy():
            continue
        if own.manual or family != "adversarial":
            on = conformance.KINDS[(i + j) % 2]
            marks = [] if (i + j) % 17 == 0 else [pytest.mark.slow]
            found.append(pytest.param(family, option, on, marks=marks))
    return found


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")
@pytest.mark.filterwarnings("ignore:The provided params to be frozen already exist within another")
@pytest.mark.parametrize(("family", "option", "on"), families(), indirect=["on"])
@pytest.mark.usefixtures("switching")
def test_as_one_device_whoever_works(
    family: str, option: str, on: str, ways: Ways, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = conformance.OPTIONS[option]
    auto = replace(own, strategy=lambda: {**own.strategy(), "split": "auto"})

    def several(*_: Any) -> Any:
        return conformance.several_devices_with(family, auto)

    monkeypatch.setattr(conformance, "several_devices", several)
    conformance.test_as_one_device(family, option, on)
    assert ways["several"] and ways["alone"] + ways["root"]


# Every mode, with changing ways


class SumOfLosses(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * len(batch[1]) / 25


class MovesTargets(Classifier):
    def loss(self, batch: Any) -> Tensor:
        outputs = self(batch[0])
        return nn.functional.cross_entropy(outputs, batch[1].to(outputs.device))


class CountsItems(Classifier):
    """A mean over something else than samples, and more in its output."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().loss(batch)
        return {"loss": loss, "num_items": len(batch[1]), "y": batch[1]}


class Stateful(Classifier):
    """Metrics, lists and other state on self, and logs of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=3)
        self.seen: list[Tensor] = []
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(batch[1])
        self.steps += 1
        self.accuracy(self(batch[0]), batch[1])
        self.log("train/acc", self.accuracy, on_step=True, on_epoch=True, batch_size=len(batch[1]))
        return super().training_step(batch, batch_idx)


class Normalised(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(16))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), self.lr)


class WithClosures(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), 0.01, max_iter=3)


class Stateful64(ByHand, Stateful):
    """By hand."""


DOUBLE: dict[str, Any] = {"precision": "64-true"}
MODES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "step": (Stateful, {}, {}),
    "in order": (Stateful, {"executor": "inorder"}, {}),
    "threads": (Stateful, {"executor": "threads"}, {}),
    "forward": (Classifier, {"mode": "forward"}, {}),
    "forward, batch stays": (MovesTargets, {"mode": "forward", "move_batch": False}, {}),
    "manual": (Stateful64, {}, {}),
    "manual, in order": (Stateful64, {"executor": "inorder"}, {}),
    "accumulation": (Stateful, {}, {"accumulate_grad_batches": 2}),
    "accumulation, in order": (Stateful, {"executor": "inorder"}, {"accumulate_grad_batches": 3}),
    "validation in between": (
        Stateful,
        {},
        {"accumulate_grad_batches": 3, "val_check_interval": 1},
    ),
    "clipping": (Classifier, {}, {"gradient_clip_val": 0.1}),
    "sum": (SumOfLosses, {"loss_reduction": "sum"}, {}),
    "items": (CountsItems, {}, {}),
    "output elsewhere": (Stateful, {"output_device": "cpu"}, {}),
    "output on a device": (Stateful, {"output_device": 1}, {}),
    "batch norm": (Normalised, {}, {"sync_batchnorm": True}),
    "closures": (WithClosures, {}, {}),
    "one device twice": (Stateful, {"devices": "twice"}, {}),
}


@pytest.mark.parametrize("name", MODES)
@pytest.mark.usefixtures("switching")
def test_every_mode_has_one_devices_numbers(name: str, on: str, ways: Ways) -> None:
    make, options, kwargs = MODES[name]
    if options.get("devices"):
        options = {**options, "devices": [str(d) for d in devices_of(2) for _ in "ab"]}
    result = run(make, 4, strategy={"split": "auto", **options}, **DOUBLE, **kwargs)
    counted = dict(ways)
    expected = run(make, 1, **DOUBLE, **kwargs)
    assert_same(result, expected, **EXACT)
    if make is Stateful:
        assert result.module.steps == expected.module.steps
        kept = [torch.cat(job.module.seen).tolist() for job in (result, expected)]
        assert kept[0] == kept[1]
    stays = on == "sim" and ("output_device" in options or not options.get("move_batch", True))
    assert counted.get("several") and counted.get("root" if stays else "alone"), counted
    assert not stays or not counted.get("alone")
