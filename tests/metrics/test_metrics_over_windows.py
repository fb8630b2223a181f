"""A metric over a window of calls counts batches, as on one device; a mean in another is a mean."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import Classifier, assert_equal_trees, loader, trainer
from torch import Tensor
from torchmetrics import (
    CatMetric,
    MeanMetric,
    MeanSquaredError,
    MetricCollection,
    MinMaxMetric,
    RunningMean,
    RunningSum,
    SumMetric,
)
from torchmetrics.wrappers import Running

from lightning_dp import DataParallelStrategy

pytestmark = pytest.mark.usefixtures("on", "one_thread")


def of_means(rows: Tensor) -> tuple[Any, ...]:
    return (rows.mean(),)


def of_numbers(rows: Tensor) -> tuple[Any, ...]:
    return (rows.mean().item(),)


def of_sums(rows: Tensor) -> tuple[Any, ...]:
    return (rows.sum().item(),)


def of_rows(rows: Tensor) -> tuple[Any, ...]:
    return (rows[:, 0],)


def of_pairs(rows: Tensor) -> tuple[Any, ...]:
    return rows[:, 0], rows[:, 1]


CASES: dict[str, tuple[Callable[[], Any], Callable[[Tensor], tuple[Any, ...]]]] = {
    "mean of tensors": (lambda: RunningMean(window=2), of_means),
    "mean of numbers": (lambda: RunningMean(window=3), of_numbers),
    "mean of rows": (lambda: RunningMean(window=2), of_rows),
    "sum of numbers": (lambda: RunningSum(window=2), of_sums),
    "of a window of one": (lambda: RunningSum(window=1), of_sums),
    "wrapped": (lambda: Running(SumMetric(), window=3), of_sums),
    "wrapped, of lists": (lambda: Running(CatMetric(), window=2), of_rows),
    "wrapped, of pairs": (lambda: Running(MeanSquaredError(), window=2), of_pairs),
    "with one that is none": (lambda: MetricCollection([RunningSum(2), SumMetric()]), of_sums),
    "means together": (lambda: MetricCollection([RunningMean(2), MeanMetric()]), of_means),
    "best mean": (lambda: MinMaxMetric(MeanMetric()), of_numbers),
}


class Measured(Classifier):
    def __init__(self, case: str, method: str) -> None:
        super().__init__()
        make, self.arguments = CASES[case]
        self.metric, self.method = make(), method
        self.values: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        getattr(self.metric, self.method)(*self.arguments(self(batch[0]).detach()))
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        self.values.append(self.metric.compute())


def values_on(devices: int, case: str, method: str, **options: Any) -> list[Any]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    module = Measured(case, method)
    job = trainer(devices, DataParallelStrategy(**options), max_epochs=1)
    job.fit(module, loader(batch_size=13), loader())
    return module.values


@pytest.mark.parametrize(
    ("method", "executor"),
    [("update", "inorder"), pytest.param("forward", "threads", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("case", CASES)
def test_a_batch_is_one_of_a_window(case: str, method: str, executor: str) -> None:
    expected = values_on(1, case, method)
    actual = values_on(3, case, method, executor=executor)
    assert len(expected) > 3
    assert_equal_trees(actual, expected, case, atol=1e-10)
