"""Steps that take `dataloader_iter` run once, and see and leave what they do on one device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.oracle import Classifier, assert_same, loader, run, samples, trainer
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

pytestmark = [
    pytest.mark.usefixtures("on"),
    pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor"),
    pytest.mark.filterwarnings("ignore:Found `dataloader_iter` argument"),
]


class Iterating(Classifier):
    """All of its steps take the iterator, and move what they get themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.indices: dict[str, list[Any]] = {}

    def take(self, stage: str, dataloader_iter: Any) -> Any:
        batch, *indices = next(dataloader_iter)
        known = (dataloader_iter.done, dataloader_iter.fetched, dataloader_iter.length)
        self.indices.setdefault(stage, []).append((*indices, *known))
        return self.trainer.strategy.batch_to_device(batch, dataloader_idx=indices[1])

    def training_step(self, dataloader_iter: Any) -> Any:
        stage = str(self.trainer.state.stage)
        x, y = self.take(stage, dataloader_iter)
        loss = F.cross_entropy(self(x), y)
        self.log(f"{stage}/loss", loss, on_step=True, on_epoch=True, batch_size=len(x))
        return loss

    validation_step = test_step = training_step

    def predict_step(self, dataloader_iter: Any) -> Any:
        return self(self.take("predict", dataloader_iter)[0])


class Pairs(Iterating):
    """Two batches in a training step, of any sizes, as long as there are two."""

    def training_step(self, dataloader_iter: Any) -> Any:
        loss = super().training_step(dataloader_iter)
        return loss if dataloader_iter.done else loss + super().training_step(dataloader_iter)


class Unsized(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([samples(30)[i] for i in range(30)])


def unsized() -> DataLoader[Any]:
    return DataLoader(Unsized(), batch_size=8)


@pytest.mark.parametrize(("make", "data"), [(Iterating, unsized), (Pairs, loader)])
def test_the_numbers_and_the_batches_are_those_of_one_device(make: Any, data: Any) -> None:
    torch.set_default_dtype(torch.float64)
    several, one = run(make, 3, data=data), run(make, 1, data=data)
    assert_same(several, one)
    assert several.module.indices == one.module.indices


def test_steps_with_batches_stay_in_step_mode(caplog: pytest.LogCaptureFixture) -> None:
    """An iterator is an ordinary batch unless the argument has that name."""
    caplog.set_level("INFO", "lightning")
    trainer(2).fit(Classifier(), loader(), loader())
    assert "forward mode" not in caplog.text
    trainer(2).fit(Iterating(), loader(), loader())
    line = "Iterating runs in forward mode, as its training_step takes dataloader_iter"
    assert line in caplog.text
