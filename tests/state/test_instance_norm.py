"""Running statistics of instance norm are means over samples: `buffers="mean"` is one device's."""

from typing import Any

import pytest
import torch
from oracle import Classifier, assert_same, run
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("on", "one_thread")


class Normed(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(2, track_running_stats=True)

    def forward(self, x: Tensor) -> Any:
        return self.net(self.norm(x.view(-1, 2, 5)).flatten(1))


@pytest.mark.parametrize("mode", ["step", "forward"])
def test_the_mean_of_running_statistics_is_that_of_the_batch(mode: str) -> None:
    torch.set_default_dtype(torch.float64)
    strategy = {"mode": mode, "buffers": "mean"}
    assert_same(run(Normed, 3, strategy=strategy), run(Normed, 1))
