"""Under an even split, one line says when one device would be faster, if that is sure."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import LightningModule
from oracle import Classifier, loader, trainer
from torch import Tensor, nn

from lightning_dp import DataParallelStrategy
from lightning_dp.parallel.split import FewerDevices, even

K = 4


def seen(fixed: float, per_sample: float, own: float, smaller: int = 0) -> FewerDevices:
    """Steps of K replicas, one after another, with an engine that takes time of its own."""
    devices = FewerDevices()
    for n in [64] * 20 + [smaller] * 5 * bool(smaller):
        busy = K * fixed + per_sample * n
        devices.add(even(n, K), busy, busy + own)
    return devices


def test_a_step_whose_time_is_fixed_would_be_faster_on_one_device() -> None:
    verdict = seen(fixed=4.0, per_sample=0.0, own=1.0, smaller=20).verdict()
    assert verdict is not None
    assert verdict.together == 17.0 and verdict.alone == pytest.approx(4.0)


def test_an_engine_that_takes_longer_than_the_work_is_no_gain_either() -> None:
    verdict = seen(fixed=0.0, per_sample=0.01, own=1.0).verdict()
    assert verdict is not None and verdict.alone == pytest.approx(0.64)


def test_without_smaller_batches_nothing_counts_as_fixed() -> None:
    assert seen(fixed=4.0, per_sample=0.0, own=1.0).verdict() is None


def test_a_step_that_computes_says_nothing() -> None:
    assert seen(fixed=0.1, per_sample=1.0, own=1.0, smaller=20).verdict() is None


def test_replicas_at_the_same_time_say_nothing() -> None:
    for busy in (None, 1.0):  # one after another one device would take a quarter of that
        devices = FewerDevices()
        for n in (16, 4):
            for _ in range(20):
                devices.add((n,) * 4, busy, 1.0)
        assert (devices.verdict() is None) == (busy is None)


@given(
    st.floats(0, 10),
    st.floats(0.001, 1),
    st.floats(0, 10),
    st.sampled_from([0, 8, 20, 40]),
    st.lists(st.floats(1, 1.5), min_size=8, max_size=8),
)
def test_what_is_said_of_one_device_is_no_less_than_it_takes(
    fixed: float, per_sample: float, own: float, smaller: int, noise: list[float]
) -> None:
    devices = FewerDevices()
    noise = [1.0, *noise]  # it only adds, and is gone once
    for n in [64, smaller or 64]:
        for factor in noise:
            busy = (K * fixed + per_sample * n) * factor
            devices.add(even(n, K), busy, busy + own)
    verdict = devices.verdict()
    if verdict is not None:
        assert verdict.alone >= (fixed + per_sample * 64) * (1 - 1e-9)


class Deep(LightningModule):
    """Many narrow layers: a step takes as long with few samples as with many."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(40))
        self.net = nn.Sequential(*layers)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0][:, :4]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


def told(caplog: Any) -> list[str]:
    return [r.getMessage() for r in caplog.records if "ms per step" in r.getMessage()]


def fit(module: LightningModule, devices: int = 2, **options: Any) -> None:
    job = trainer(devices, DataParallelStrategy(executor="inorder", **options), max_epochs=16)
    job.fit(module, loader(), loader() if "validation_step" in vars(type(module)) else None)


@pytest.mark.usefixtures("one_thread")
def test_the_line_is_said_once_a_fit_and_names_both_times(caplog: Any) -> None:
    with caplog.at_level(logging.WARNING, "lightning_dp"):
        fit(Deep())
    (text,) = told(caplog)
    assert text.startswith("2 devices take ") and 'split="auto"' in text
    together, alone = map(float, re.findall(r"([0-9.]+) ms", text))
    assert together > alone > 0


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("options", [{"split": "chunk"}, {"weights": [1, 2]}, {"mode": "forward"}])
def test_other_splits_and_forward_mode_say_nothing(options: Any, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING, "lightning_dp"):
        fit(Deep(), **options) if "mode" not in options else fit(Classifier(), **options)
    assert not told(caplog)


class Computes(Deep):
    """Each sample takes its time."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = torch.zeros(())
        for x in batch[0]:
            for _ in range(40):
                loss = loss + (self.net[0](x[:4])).sum() / len(batch[0])
        return loss


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_a_step_in_which_samples_take_their_time_says_nothing(caplog: Any) -> None:
    with caplog.at_level(logging.WARNING, "lightning_dp"):
        fit(Computes())
    assert not told(caplog)
