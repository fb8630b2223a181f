"""Memory that runs out while metrics are updated and values are logged: an error by name."""

from __future__ import annotations

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


class Total(Metric):
    """Runs out of memory in an update with the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float64), "sum")

    def update(self, x: Tensor) -> None:
        self.total += x.sum()
        if len(x) > 20:
            x.new_empty(10**12)

    def compute(self) -> Tensor:
        return self.total


class Measured(Classifier):
    """Measures in a forward, which in forward mode is spread."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.total = self.net.double(), Total()

    def forward(self, x: Tensor) -> Any:
        if self.training:
            self.total.update(x.detach())
        return self.net(x)


OPTIONS: dict[str, Any] = {"precision": "64-true", "num_sanity_val_steps": 0}


@pytest.mark.parametrize("mode", ["step", "forward"])
@pytest.mark.usefixtures("unchecked")
def test_no_room_for_the_whole_batch_is_an_error_that_names_the_metric(
    mode: str, room: Any
) -> None:
    """Other sizes of shards would not help: the metric gets the whole batch."""
    for device in range(3):
        room(device, 2**30)
    text = r"Expected room.*out of memory.*in update of the metric total \(Total\).*smaller"
    with pytest.raises(RuntimeError, match=text) as caught:
        job = oracle.trainer(3, DataParallelStrategy(mode=mode), **OPTIONS)
        job.fit(Measured(), loader())
    assert not isinstance(caught.value, torch.OutOfMemoryError)
