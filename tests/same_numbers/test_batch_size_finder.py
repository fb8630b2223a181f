"""Lightning's tuner of batch sizes finds on simulated devices what fits, as it does on GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.tuner import Tuner
from support import oracle
from support.oracle import Classifier, loader
from torch import nn

from lightning_dp import DataParallelStrategy

pytestmark = [
    pytest.mark.sim_only("Of a GPU's memory no limit can be set to the byte."),
    pytest.mark.filterwarnings("ignore:`weights_only` was not set"),
]
WIDTH = 256
ROOM = 512 * 1024
"""Some hundred samples: each has a hidden layer of WIDTH, the weights take some 70 KiB."""


class Sized(Classifier):
    """Makes its own loader, of batches whose size a tuner may choose."""

    validation_step: Any = None

    def __init__(self, batch_size: int = 8) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.net = nn.Sequential(nn.Linear(10, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))

    def train_dataloader(self) -> Any:
        return loader(2000, self.batch_size)


def job(devices: int, strategy: dict[str, Any], folder: Path) -> Any:
    own: Any = {"default_root_dir": folder, "max_epochs": -1, "max_steps": 2}
    if devices == 1:  # as on one GPU: Lightning's own strategy
        return oracle.trainer(1, "auto", **{"accelerator": "sim", **own})
    return oracle.trainer(devices, DataParallelStrategy(**strategy), **own)


def found(devices: int, mode: Any, strategy: dict[str, Any], folder: Path) -> int | None:
    options: Any = {"mode": mode, "steps_per_trial": 2, "max_trials": 25}
    if mode == "binsearch":
        options["margin"] = 0.0
    module, own = Sized(), job(devices, strategy, folder)
    size: int | None = Tuner(own).scale_batch_size(module, **options)
    assert size == module.batch_size
    return size


def fits(devices: int, n: int, strategy: dict[str, Any], folder: Path) -> bool:
    try:
        job(devices, strategy, folder).fit(Sized(n))
    except torch.OutOfMemoryError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "strategy"),
    [(1, {}), (2, {}), (2, {"mode": "forward"}), (3, {"split": "adaptive"})],
    ids=str,
)
def test_the_largest_batch_is_found(
    devices: int, strategy: dict[str, Any], room: Any, tmp_path: Path
) -> None:
    for device in range(devices):
        room(device, ROOM)
    doubled = found(devices, "power", strategy, tmp_path)
    assert doubled is not None and fits(devices, doubled, strategy, tmp_path)
    assert not fits(devices, 2 * doubled, strategy, tmp_path)
    if strategy.get("mode") == "forward":
        return  # its backward is not done again: what fits depends on what the fit has learnt
    largest = found(devices, "binsearch", strategy, tmp_path)
    assert largest is not None and doubled <= largest < 2 * doubled
    # What is logged and kept between steps takes the room of a few samples. Buffers for sums take
    # that of some more, until memory runs out.
    assert fits(devices, largest - 4, strategy, tmp_path)
    assert not fits(devices, largest + 40, strategy, tmp_path)
