"""Memory that runs out while metrics are updated and values are logged: an error by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support import oracle
from support.oracle import Classifier, loader
from torch import Tensor
from torchmetrics import Metric

from lightning_dp import DataParallelStrategy

pytestmark = [
    pytest.mark.sim_only("Of a GPU's memory no limit can be set to the byte."),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
]

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
    """Runs out of memory in an update with the whole batch."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.add_state("total", torch.zeros((), dtype=torch.float64), "sum")

    def update(self, x: Tensor) -> None:
        self.total += x.sum()
        if len(x) > 20:
            no_room(self.name, x)

    def compute(self) -> Tensor:
        return self.total


class Measured(Classifier):
    """Measures after another metric and a log, in the step or in a forward that is spread."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode
        self.net = self.net.double()
        self.first, self.second = Total("first"), Total("second")

    def measure(self, x: Tensor) -> None:
        self.first(x.detach())
        self.second.update(x.detach())

    def forward(self, x: Tensor) -> Any:
        if self.mode == "forward":
            self.measure(x)
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.mode == "step":
            self.measure(batch[0])
        return super().training_step(batch, batch_idx)


OPTIONS: dict[str, Any] = {"precision": "64-true", "num_sanity_val_steps": 0}


@pytest.mark.parametrize("mode", ["step", "forward"])
@pytest.mark.usefixtures("unchecked")
def test_no_room_for_the_whole_batch_is_an_error_that_names_the_metric(mode: str) -> None:
    """Other sizes of shards would not help: the metric gets the whole batch."""
    fails.add("second")
    text = r"Expected room.*out of memory.*update of the metric second \(Total\).*smaller"
    with pytest.raises(RuntimeError, match=text) as caught:
        job = oracle.trainer(3, DataParallelStrategy(mode=mode), **OPTIONS)
        job.fit(Measured(mode), loader())
    assert not isinstance(caught.value, torch.OutOfMemoryError)
