"""Values that metrics return in a step, and that it logs: those of the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchmetrics
from oracle import ByHand, Classifier, assert_same, loader, run
from torch.nn import functional as F
from torchmetrics import classification

pytestmark = pytest.mark.usefixtures("one_thread")


class Measured(Classifier):
    """Logs what metrics return, and no metric."""

    def __init__(self) -> None:
        super().__init__()
        self.f1 = classification.MulticlassF1Score(3, average="macro")
        self.error = torchmetrics.MeanSquaredError(squared=False)
        self.fit = torchmetrics.R2Score()  # for two samples at least
        self.largest = torchmetrics.MaxMetric()
        self.both = torchmetrics.MetricCollection(
            {
                "recall": classification.MulticlassRecall(3),
                "top": classification.Accuracy("multiclass", num_classes=3),
            }
        )
        self.by_class = torchmetrics.ClasswiseWrapper(
            classification.MulticlassPrecision(3, average=None)
        )

    def measure(self, batch: Any, stage: str) -> Any:
        x, y = batch
        z = self(x)
        self.log(f"{stage}/f1", self.f1(z, y), on_step=True, on_epoch=True)
        first = self.error(z, F.one_hot(y, 3).to(z))
        second = self.error(2 * z, F.one_hot(y, 3).to(z))
        self.log(f"{stage}/second", second, batch_size=len(x))
        self.log(f"{stage}/first", first)
        self.log(f"{stage}/fit", self.fit(z[:, 0], y.to(z)))
        self.log(f"{stage}/largest", self.largest(z), reduce_fx="max")
        self.log_dict({f"{stage}/{name}": value for name, value in self.both(z, y).items()})
        self.log_dict({f"{stage}/{name}": v for name, v in self.by_class(z, y).items()})
        return F.cross_entropy(z, y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.measure(batch, "train")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.measure(batch, "val")


class MeasuredByHand(ByHand, Measured):
    pass


QUIET = pytest.mark.filterwarnings("ignore:No (positive|negative) samples")


@QUIET
@pytest.mark.usefixtures("on")
@pytest.mark.parametrize("make", [Measured, MeasuredByHand])
@pytest.mark.parametrize("devices", [2, 3])
def test_logged_values_of_metrics_are_one_devices(make: Any, devices: int) -> None:
    """Batches of 20 and 3: then each of three shards is too small for some of them."""
    torch.set_default_dtype(torch.float64)
    options: dict[str, Any] = {"data": lambda: loader(23, 20)}
    assert_same(run(make, devices, **options), run(make, 1, **options))


class OneByOne(Classifier):
    """Calls a metric for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.error = torchmetrics.MeanAbsoluteError()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        values = [self.error(x.mean(), y.to(x)) for x, y in zip(*batch, strict=True)]
        self.log("val/mean", torch.stack(values).mean())
        self.log("val/error", self.error)


def test_where_it_is_called_for_each_sample_values_are_those_of_samples() -> None:
    torch.set_default_dtype(torch.float64)
    assert_same(run(OneByOne, 3), run(OneByOne, 1))
