"""0-dim outputs keep their dtype when they are gathered; what nothing tells is refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from oracle import assert_equal_trees, devices_of, loader, trainer

from lightning_dp import DataParallelStrategy, gather
from lightning_dp.parallel.batch.join import GatherError

pytestmark = pytest.mark.usefixtures("on")

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]


def scalars(values: list[Any], dtype: torch.dtype) -> list[torch.Tensor]:
    pairs = zip(values, devices_of(len(values)), strict=True)
    return [torch.tensor(value, dtype=dtype, device=device) for value, device in pairs]


@pytest.mark.parametrize("dtype", INTEGERS + FLOATS, ids=str)
def test_numbers_keep_their_dtype(dtype: torch.dtype) -> None:
    joined = gather(scalars([3, 1, 2], dtype), "cpu", sizes=[3, 1, 2])
    expected = 6 if dtype in INTEGERS else (9 + 1 + 4) / 6
    assert joined.dtype == dtype and joined.shape == ()
    torch.testing.assert_close(joined, torch.tensor(expected, dtype=dtype))
    stacked = gather(scalars([3, 1, 2], dtype), "cpu", sizes=[3, 1, 2], scalars="stack")
    assert stacked.dtype == dtype and stacked.shape == (3,)


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64, np.float32], ids=str)
def test_numbers_of_numpy_keep_their_dtype(dtype: Any) -> None:
    assert gather([dtype(3), dtype(1)], "cpu", sizes=[2, 2]).dtype == dtype
    assert type(gather([np.bool_(True), np.bool_(True)], "cpu", sizes=[2, 2])) is np.bool_


@pytest.mark.parametrize("value", [True, False])
def test_equal_answers_are_the_answer(value: bool) -> None:
    joined = gather({"a": scalars([value] * 3, torch.bool)}["a"], "cpu", sizes=[3, 1, 2])
    assert joined.dtype == torch.bool and joined.item() is value


def test_answers_that_differ_are_refused_by_name() -> None:
    outputs: list[Any] = [{"done": {"now": t}} for t in scalars([True, False], torch.bool)]
    with pytest.raises(GatherError, match=r"output\['done'\]\['now'\]: expected the same bool"):
        gather(outputs, "cpu", sizes=[2, 1])
    options: dict[str, Any] = {"sizes": [2, 1], "overrides": {"now": "stack"}}
    assert gather(outputs, "cpu", **options)["done"]["now"].tolist() == [True, False]
    options["overrides"] = {"now": "first"}
    assert gather(outputs, "cpu", **options)["done"]["now"].item() is True


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_sums_that_are_asked_for_keep_their_dtype(dtype: torch.dtype) -> None:
    outputs = [{"n": t} for t in scalars([3, 1], dtype)]
    joined = gather(outputs, "cpu", sizes=[2, 1], overrides={"n": "sum"})
    assert joined["n"].dtype == dtype and joined["n"].item() == 4


def test_tensors_without_rows_of_samples_keep_their_dtype() -> None:
    counts = [torch.tensor([1, 2], dtype=torch.int32), torch.tensor([5, 5], dtype=torch.int32)]
    with pytest.warns(UserWarning, match="they are added up"):
        joined = gather(counts, "cpu", sizes=[3, 1])
    assert joined.dtype == torch.int32 and joined.tolist() == [6, 7]
    masks = [torch.tensor([True, False]), torch.tensor([True, True])]
    with pytest.raises(GatherError, match="output: expected the same bool"):
        gather(masks, "cpu", sizes=[3, 1])


class Counting(LightningModule):
    """Its steps return counts and an answer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(10, 3)
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return {
            "loss": self.net(x).square().mean(),
            "zeros": (y == 0).sum(dtype=torch.int32),
            "finite": x.isfinite().all(),
        }

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append({k: v.cpu() for k, v in outputs.items() if k != "loss"})

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_through_lightning() -> None:
    def fit(k: int) -> Any:
        module = Counting()
        trainer(k, DataParallelStrategy(), max_epochs=1).fit(module, loader())
        return module.seen

    assert_equal_trees(fit(3), fit(1), "outputs", atol=0.0, rtol=0.0)
