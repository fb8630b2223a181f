"""pytorch-forecasting: its losses are torchmetrics, its predictions named tuples of its own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
from comparison import Job, as_one_device, compare
from torch import nn
from torch.utils.data import DataLoader

pytest.importorskip("pytorch_forecasting")

import pandas as pd
import pytorch_forecasting as forecasting

pytestmark = pytest.mark.interop

DAYS, HISTORY, HORIZON = 30, 8, 3


@cache
def dataset(shortest: int = HISTORY) -> Any:
    days = np.arange(DAYS)
    random = np.random.default_rng(0)
    frames = [
        pd.DataFrame(
            {
                "day": days,
                "shop": f"shop {shop}",
                "weekday": (days % 7).astype(str),
                "price": random.normal(size=DAYS),
                "sold": 5 + shop + np.sin(days) + random.normal(size=DAYS),
            }
        )
        for shop in range(4)
    ]
    return forecasting.TimeSeriesDataSet(
        pd.concat(frames, ignore_index=True),
        time_idx="day",
        target="sold",
        group_ids=["shop"],
        min_encoder_length=shortest,
        max_encoder_length=HISTORY,
        min_prediction_length=HORIZON,
        max_prediction_length=HORIZON,
        static_categoricals=["shop"],
        time_varying_known_categoricals=["weekday"],
        time_varying_known_reals=["price"],
        time_varying_unknown_reals=["sold"],
        target_normalizer=forecasting.GroupNormalizer(groups=["shop"]),
        add_relative_time_idx=True,
    )


class Cut(forecasting.TemporalFusionTransformer):
    """Cuts the padding too: the module pads to the longest history that it sees, as here a shard's.

    In step mode a batch is inputs and targets, in forward mode the arguments of the call.
    """

    def split_batch(self, batch: Any, sizes: Sequence[int]) -> list[Any]:
        inputs = batch[0]
        columns = {name: column.split(list(sizes)) for name, column in inputs.items()}
        shards = [{name: parts[k] for name, parts in columns.items()} for k in range(len(sizes))]
        for shard in shards:
            longest = int(shard["encoder_lengths"].max()) if len(shard["encoder_lengths"]) else 0
            for name in ("encoder_cat", "encoder_cont", "encoder_target"):
                shard[name] = shard[name][:, :longest]
        if isinstance(batch, dict):
            return [{**batch, 0: shard} for shard in shards]
        targets, weights = batch[1]
        assert weights is None
        parts = targets.split(list(sizes))
        return [(shard, (part, None)) for shard, part in zip(shards, parts, strict=True)]

    def batch_size(self, batch: Any) -> int:
        return len(batch[0]["encoder_lengths"])


def transformer(cls: type[Any] = forecasting.TemporalFusionTransformer, shortest: int = HISTORY):
    return cls.from_dataset(
        dataset(shortest),
        hidden_size=8,
        hidden_continuous_size=4,
        attention_head_size=2,
        dropout=0.0,
        learning_rate=1e-2,
        loss=forecasting.QuantileLoss(),
        logging_metrics=nn.ModuleList([forecasting.MAE()]),
    )


def job(shortest: int, cls: type[Any] = forecasting.TemporalFusionTransformer) -> Job:
    def loader() -> DataLoader[Any]:
        return dataset(shortest).to_dataloader(train=False, batch_size=25)

    def predict(module: Any, trainer: dict[str, Any]) -> Any:
        """As the library does it."""
        options = {"return_index": True, "return_y": True, "trainer_kwargs": trainer}
        found = module.predict(loader(), mode="raw" if is_equal else "quantiles", **options)
        output = dict(found.output._asdict()) if is_equal else found.output
        return [output, found.y, found.index.to_dict("list")]

    is_equal = shortest == HISTORY
    return Job(
        "pytorch-forecasting",
        "TFT" if is_equal else "TFT, unequal lengths",
        partial(transformer, cls, shortest),
        loader,
        predict=predict,
        trainer={"precision": "64-true"},
        # Attention to the past, of which only the step knows.
        warns=() if is_equal else (r"output.* do not fit together, and come as a list",),
    )


EQUAL, UNEQUAL = job(HISTORY), job(HISTORY // 2, Cut)


FORWARD = {"mode": "forward"}
test_as_one_device = as_one_device((EQUAL, {}), (EQUAL, FORWARD), (UNEQUAL, {}), (UNEQUAL, FORWARD))


def test_padding_that_is_longer_than_the_shard_is_an_error(on: str) -> None:
    with pytest.raises(RuntimeError, match="must match the size") as caught:
        compare(job(HISTORY // 2), on)
    assert any("in replica" in note for note in caught.value.__notes__)
