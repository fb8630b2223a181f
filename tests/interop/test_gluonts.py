"""GluonTS: loaders of its own that yield dicts, and steps that call `self.model.loss`."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from comparison import Job, as_one_device, distance
from lightning.pytorch import LightningModule
from support import oracle
from torch.utils.data import DataLoader

pytest.importorskip("gluonts.torch")

from gluonts.dataset.common import ListDataset
from gluonts.torch import DeepAREstimator, SimpleFeedForwardEstimator

pytestmark = pytest.mark.interop

HORIZON = 4
COMMON: dict[str, Any] = {
    "prediction_length": HORIZON,
    "lr": 1e-2,
    "batch_size": 16,
    "num_batches_per_epoch": 6,
}


@cache
def series() -> ListDataset:
    random = np.random.default_rng(0)
    rows = [
        {"start": "2024-01-01", "target": 5 + i + np.sin(np.arange(60)) + random.normal(size=60)}
        for i in range(5)
    ]
    return ListDataset(rows, freq="D")


@cache
def deepar(**trainer: Any) -> DeepAREstimator:
    # Without `default_scale`, a series without a past is scaled by the mean of its batch.
    options: dict[str, Any] = {"lags_seq": [1, 2, 7], "default_scale": 1.0, "dropout_rate": 0.0}
    options["trainer_kwargs"] = trainer
    return DeepAREstimator(freq="D", context_length=8, hidden_size=8, **options, **COMMON)


@cache
def feed_forward() -> SimpleFeedForwardEstimator:
    return SimpleFeedForwardEstimator(context_length=8, hidden_dimensions=[12], **COMMON)


@cache
def batches(estimator: Any) -> list[dict[str, torch.Tensor]]:
    """One epoch of what the estimator draws at random from the series, so that all get the same."""
    np.random.seed(0)
    module = estimator.create_lightning_module()
    rows = estimator.create_transformation().apply(series(), is_train=True)
    *full, last = estimator.create_training_data_loader(rows, module)
    return [*full, {name: column[:5] for name, column in last.items()}]


def predict(estimator: Any, module: LightningModule) -> list[Any]:
    """As the library does it: without a Trainer."""

    def in_double(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs = {k: v.double() if v.is_floating_point() else v for k, v in kwargs.items()}
        return tuple(x.double() if x.is_floating_point() else x for x in args), inputs

    torch.manual_seed(0)  # forecasts are samples
    with module.register_forward_pre_hook(in_double, with_kwargs=True):
        predictor = estimator.create_predictor(estimator.create_transformation(), module)
        return [forecast.mean for forecast in predictor.predict(series())]


def job(name: str, make: Any) -> Job:
    return Job(
        "gluonts",
        name,
        make=lambda: make().create_lightning_module(),
        data=lambda: DataLoader(batches(make()), batch_size=None),
        predict=lambda module, _: predict(make(), module),
        trainer={"precision": "64-true"},
    )


DEEPAR, FEED_FORWARD = job("DeepAR", deepar), job("SimpleFeedForward", feed_forward)


# The step does not call the module but its parts: these are named.
test_as_one_device = as_one_device(
    (DEEPAR, {}),
    (DEEPAR, {"mode": "forward", "parallel_modules": ["model.rnn", "model.param_proj"]}),
    (FEED_FORWARD, {}),
    (FEED_FORWARD, {"mode": "forward", "parallel_modules": ["model"]}),
)


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`", "ignore:Using a non-tuple")
def test_the_librarys_own_trainer(on: str, tmp_path: Path) -> None:
    """It is told by the strategy's name; windows are drawn at random, as the main thread has it."""

    def trained(accelerator: str, **options: Any) -> Any:
        np.random.seed(0)
        torch.manual_seed(0)
        quiet = {name: False for name in oracle.QUIET if name != "enable_checkpointing"}
        options |= {
            "max_epochs": 5,
            "precision": "64-true",
            "default_root_dir": str(tmp_path / str(options["devices"])),
        }
        estimator = deepar(accelerator=accelerator, **quiet, **options)
        return estimator.train(series()).prediction_net.state_dict()

    expected, actual = trained("cpu", devices=1), trained(on, devices=3, strategy="dp_custom")
    assert distance(actual, expected, "state") < 1e-9
