"""neuralforecast: series that the step itself cuts into windows; for `pytorch_lightning`."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import pytest
from comparison import Job, as_one_device
from torch.utils.data import DataLoader

pytest.importorskip("neuralforecast")

from neuralforecast.losses.pytorch import MAE
from neuralforecast.models import NHITS
from neuralforecast.tsdataset import TimeSeriesDataset, TimeSeriesLoader

pytestmark = pytest.mark.interop

SERIES, DAYS, HORIZON, HISTORY = 23, 40, 4, 8


@cache
def series() -> TimeSeriesDataset:
    random = np.random.default_rng(0)
    frames = [
        pd.DataFrame(
            {
                "unique_id": i,
                "ds": pd.date_range("2024-01-01", periods=DAYS),
                "y": 5 + i + np.sin(np.arange(DAYS)) + random.normal(size=DAYS),
            }
        )
        for i in range(SERIES)
    ]
    return TimeSeriesDataset.from_df(pd.concat(frames, ignore_index=True))[0]


def loader() -> DataLoader[Any]:
    return TimeSeriesLoader(series(), batch_size=5)  # the last batch has 3


def network() -> NHITS:
    module = NHITS(
        h=HORIZON,
        input_size=HISTORY,
        loss=MAE(),
        learning_rate=1e-2,
        windows_batch_size=None,  # all windows: a random choice is one of each replica's own
        mlp_units=3 * [[8, 8]],
        scaler_type="standard",
        max_steps=30,
        batch_size=5,
    )
    module.val_size, module.test_size = HORIZON, 0
    return module


def predict(module: NHITS, trainer: dict[str, Any]) -> Any:
    module.trainer_kwargs |= trainer
    return module.predict(series())


NHITS_JOB = Job(
    "neuralforecast",
    "NHITS",
    network,
    loader,
    predict=predict,
    trainer={"precision": "64-true"},
    package="pytorch_lightning",
    close_logs=1e-6,  # validation counts in single precision
    # The scaler keeps what only the step itself reads.
    warns=(r"^A step binds NHITS\.scaler\.x_(shift|scale) to different values",),
)


# Validation keeps a pair for each batch, of a sum and a count, which is no row of samples.
SUMS = {"gather_overrides": {"validation_step_outputs": "sum"}}
test_as_one_device = as_one_device((NHITS_JOB, SUMS), (NHITS_JOB, {"mode": "forward"}))
