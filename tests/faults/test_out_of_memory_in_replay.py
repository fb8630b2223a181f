"""Memory that runs out while metrics are updated and logs are made: once is once all the same."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import oracle
import pytest
import torch
from oracle import Classifier, assert_same, loader, run
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric, MetricCollection

pytestmark = pytest.mark.sim_only("Of a GPU's memory no limit can be set to the byte.")

fails: set[str] = set()
"""Where memory still runs out, once each."""


def no_room(where: str, like: Tensor) -> None:
    """Runs out of memory on a simulated device."""
    if where in fails and like.device.type == "sim":
        fails.remove(where)
        like.new_empty(10**12)


@pytest.fixture(autouse=True)
def limited(room: Any) -> Iterator[None]:
    for device in range(3):
        room(device, 2**30)
    yield
    fails.clear()


class Total(Metric):
    """Has states of all kinds, and writes to each of them before and after memory runs out."""

    full_state_update = True

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.add_state("total", torch.zeros((), dtype=torch.float64), "sum")
        self.add_state("count", torch.zeros((), dtype=torch.float64), "sum")
        self.add_state("rows", [], "cat")
        self.calls = 0
        self.seen: dict[int, int] = {}

    def update(self, x: Tensor) -> None:
        self.total += x.sum()
        self.rows.append(x.detach().clone())
        self.calls += 1
        self.seen[len(self.seen)] = len(x)
        no_room(self.name, x)
        self.count = self.count + len(x)
        self.rows.append(2 * x.detach())

    def compute(self) -> Tensor:
        rows: Tensor = torch.cat([row.reshape(-1) for row in self.rows])
        return self.total / self.count + rows.double().mean() + self.calls


class Measured(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.net = self.net.double()
        self.first, self.second = Total("first"), Total("second")
        self.val_first, self.val_second = Total("val first"), Total("val second")
        self.many = MetricCollection({"a": Total("third"), "b": MeanMetric()})
        self.kept: list[Tensor] = []

    def measure(self, x: Tensor, stage: str) -> None:
        first = self.first if stage == "train" else self.val_first
        second = self.second if stage == "train" else self.val_second
        self.kept.append(x.detach()[:, 0])
        first(x.detach())
        self.log(f"{stage}/first", first, on_step=stage == "train", on_epoch=True)
        second.update(x.detach()[:, :2])
        self.log(f"{stage}/mean", x.detach().mean(), on_epoch=True, on_step=stage == "train")
        first(2 * x.detach())
        if stage == "train":
            self.log(f"{stage}/again", first, on_step=True, on_epoch=False)
        self.many.update(x.detach()[:, 0])
        self.log(f"{stage}/second", second, on_step=False, on_epoch=True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.measure(batch[0], "train")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        super().validation_step(batch, batch_idx)
        self.measure(batch[0], "val")

    def on_train_epoch_end(self) -> None:
        self.log_dict(self.many.compute())
        self.many.reset()


class Inside(Measured):
    """Measures in the forward, which forward mode spreads."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.trainer.predicting:
            self.measure(x, "train" if self.training else "val")
        z: Tensor = self.net(x)
        return z

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self(batch[0])


OPTIONS: dict[str, Any] = {"precision": "64-true", "num_sanity_val_steps": 0}


def kept(result: oracle.Run) -> list[Any]:
    return [row.tolist() for row in result.module.kept]


PLACES = ["first", "second", "third", "val first", "val second"]
CASES = [
    pytest.param(*case, marks=() if case == ("first", "threads") else pytest.mark.slow)
    for case in itertools.product(PLACES, ["threads", "inorder"])
]


@pytest.mark.slow
@pytest.mark.parametrize(("where", "executor"), CASES)
def test_what_was_replayed_is_undone_with_the_step(where: str, executor: str) -> None:
    fails.add(where)
    result = run(Measured, 3, strategy={"executor": executor}, **OPTIONS)
    assert not fails
    expected = run(Measured, 1, **OPTIONS)
    assert_same(result, expected)
    assert kept(result) == kept(expected)


@pytest.mark.parametrize("where", ["third", pytest.param("val first", marks=pytest.mark.slow)])
@pytest.mark.usefixtures("unchecked")
def test_what_a_spread_call_measured_is_undone(where: str) -> None:
    fails.add(where)
    result = run(Inside, 3, strategy={"mode": "forward"}, **OPTIONS)
    assert not fails
    expected = run(Inside, 1, **OPTIONS)
    assert_same(result, expected)
    assert kept(result) == kept(expected)


class Logging(Classifier):
    """Memory runs out when the second value is logged."""

    logged: list[str]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("a", loss)
        self.log("b", loss)
        return loss

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        self.logged.append(name)
        no_room(name, next(self.parameters()))
        super().log(name, value, *args, **kwargs)


def test_values_that_were_logged_in_part_are_final() -> None:
    fails.add("b")
    module = Logging()
    module.logged = []
    job = oracle.trainer(3)
    with pytest.raises(RuntimeError, match=r"self.log\('b'\).*out of memory.*smaller") as caught:
        job.fit(module, loader(), loader(3))
    assert not isinstance(caught.value, torch.OutOfMemoryError)
    assert module.logged[-2:] == ["a", "b"] and module.logged.count("a") == 1


class Greedy(Total):
    def update(self, x: Tensor) -> None:
        fails.add(self.name)
        super().update(x)


def test_memory_that_is_never_enough_is_told_with_the_metric() -> None:
    class Much(Measured):
        def __init__(self) -> None:
            super().__init__()
            self.second = Greedy("second")

    module = Much()
    with pytest.raises(torch.OutOfMemoryError, match=r"Greedy.*whole batch.*out of memory"):
        oracle.trainer(3, **OPTIONS).fit(module, loader(), loader(3))
    assert module.second.total == 0 and module.second.rows == [] and module.second.calls == 0
    assert module.second.seen == {} and module.kept == []
