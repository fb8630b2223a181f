"""pytorch-forecasting: its losses are torchmetrics, its predictions named tuples of its own."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from comparison import Job, compare
from torch.utils.data import DataLoader

pytest.importorskip("pytorch_forecasting")

import pandas as pd
import pytorch_forecasting as forecasting

pytestmark = pytest.mark.interop

DAYS, HISTORY, HORIZON = 30, 8, 3


@cache
def dataset() -> Any:
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
        min_encoder_length=HISTORY,
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


def loader() -> DataLoader[Any]:
    return dataset().to_dataloader(train=False, batch_size=25)


def transformer() -> Any:
    return forecasting.TemporalFusionTransformer.from_dataset(
        dataset(),
        hidden_size=8,
        hidden_continuous_size=4,
        attention_head_size=2,
        dropout=0.0,
        learning_rate=1e-2,
        loss=forecasting.QuantileLoss(),
        logging_metrics=torch.nn.ModuleList([forecasting.MAE()]),
    )


def predict(module: Any, trainer: dict[str, Any]) -> Any:
    found = module.predict(
        loader(), mode="raw", return_index=True, return_y=True, trainer_kwargs=trainer
    )
    return [dict(found.output._asdict()), found.y, found.index.to_dict("list")]


TFT = Job(
    "pytorch-forecasting",
    "TFT",
    transformer,
    loader,
    predict=predict,
    trainer={"precision": "64-true"},
)


@pytest.mark.parametrize("mode", ["step", "forward"])
def test_temporal_fusion_transformer(on: str, mode: str, record_property: Any) -> None:
    record_property("interop", TFT.row(mode, on, compare(TFT, on, mode=mode)))
