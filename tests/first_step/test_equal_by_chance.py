"""Unequal shards whose numbers are equal by chance: what was made of them is told when it shows."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from oracle import Classifier, trainer
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp.parallel.batch import StepDims

pytestmark = pytest.mark.usefixtures("on")

PATH = ("output", "found")


def test_a_number_that_turns_out_to_be_of_samples_is_told_once() -> None:
    dims = StepDims()
    assert dims.counts(PATH, [2, 2], (3, 2), "found") is False
    with pytest.warns(
        UserWarning, match=r"found: steps before had equal .* \[3, 1\] for .* \[2, 2\]"
    ):
        assert dims.counts(PATH, [3, 1], (2, 2), "found") is True
    assert dims.counts(PATH, [2, 1], (2, 2), "found") is True


@pytest.mark.parametrize("numbers", [[2, 1], [3, 2], [0, 0]])
def test_what_tells_at_once_or_is_nothing_needs_no_word(numbers: list[int]) -> None:
    dims = StepDims()
    dims.counts(PATH, numbers, (3, 2), "found")
    assert dims.counts(PATH, [1, 2], (3, 2), "found") is True


class Valid(Classifier):
    """Logs over the valid samples of a shard, and keeps the errors."""

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.keeps = keeps
        self.errors: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        valid = y > 0
        if self.keeps:
            self.errors.extend(row for row in x[valid])
        else:
            self.log("mean", x[valid].mean(), batch_size=int(valid.sum()))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("keeps", [True, False], ids=["items on self", "batch_size"])
def test_a_first_step_with_as_many_valid_samples_in_unequal_shards_is_told(keeps: bool) -> None:
    # Of shards of 3 and 2 samples there are 2 and 2 valid ones, then 3 and 1.
    valid = torch.tensor([1, 1, 0, 1, 1, 1, 1, 1, 1, 0])
    data = TensorDataset(torch.randn(10, 10), valid)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        job = trainer(2, max_epochs=1, limit_val_batches=0)
        job.fit(Valid(keeps), DataLoader(data, batch_size=5))
    text = "2 more on every replica" if keeps else "batch_size of 'mean': steps before had equal"
    assert any(text in str(warning.message) for warning in told), [str(w.message) for w in told]
