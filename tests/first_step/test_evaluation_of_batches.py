"""What is of the batch in steps that do not train: told where it is a shard's."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from oracle import Classifier, loader, run, trainer
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("on", "one_thread")

NOT_ALONE = "_step: expected outputs that samples have by themselves, got "


def predicted(make: Any, devices: int, **options: Any) -> Tensor:
    strategy = {"strategy": options} if devices > 1 else {}
    return torch.cat([part.cpu() for part in run(make, devices, **strategy).predictions])


class Centred(Classifier):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        z = self(batch[0])
        return z - z.mean(0)


class Shared(Classifier):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0]).softmax(0)


class Alone(Classifier):
    """Of each sample by itself; dropout and batch norm do nothing in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Sequential(nn.BatchNorm1d(10), nn.Dropout(0.5))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        z = self(self.norm(batch[0]))
        return (z - z.mean(1, keepdim=True)).softmax(1)


@pytest.mark.parametrize(
    ("make", "text"), [(Centred, "sub of samples and of mean over"), (Shared, "softmax along")]
)
def test_predictions_in_which_samples_meet_are_told_once(make: Any, text: str) -> None:
    with pytest.warns(UserWarning, match=NOT_ALONE + text) as records:
        several = predicted(make, 3)
    assert sum(NOT_ALONE in str(record.message) for record in records) == 1
    expected = predicted(make, 1)
    assert not torch.allclose(several, expected)
    torch.testing.assert_close(predicted(make, 3, mode="forward"), expected)


def test_predictions_of_each_sample_are_as_on_one_device_and_are_not_told() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*LeafSpec|.*does not have many workers")
        job = trainer(3)
        several = torch.cat([z.cpu() for z in job.predict(Alone(), loader())])
    expected = trainer(1).predict(Alone(), loader())
    assert several.shape == torch.cat(expected).shape


class Confusion(Classifier):
    """Counts in a buffer, in whatever step."""

    gathers = False

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("confusion", torch.zeros(3, 3))

    def count(self, batch: Any) -> None:
        pairs = 3 * batch[1] + self(batch[0]).argmax(1)
        pairs = self.all_gather(pairs).flatten() if self.gathers else pairs
        self.confusion += torch.bincount(pairs, minlength=9).view(3, 3)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.count(batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.count(batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        self.count(batch)
        return batch[1]


class Gathered(Confusion):
    gathers = True


STAGES = {
    "validate": lambda job, net: job.validate(net, loader(), verbose=False),
    "test": lambda job, net: job.test(net, loader(), verbose=False),
    "predict": lambda job, net: job.predict(net, loader()),
}


@pytest.mark.parametrize("stage", STAGES)
def test_buffers_that_evaluation_leaves_different_are_told(stage: str) -> None:
    net = Confusion()
    with pytest.warns(UserWarning, match=r"different on the replicas \(confusion\)"):
        STAGES[stage](trainer(3), net)
    assert net.confusion.sum() < 53


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_gathered_first_counts_all_samples_and_is_not_told(stage: str) -> None:
    net = Gathered()
    STAGES[stage](trainer(3), net)
    assert net.confusion.sum() == 53
