"""`self.log` inside steps: the values of one device, on step and on epoch."""

import itertools
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from support.oracle import Classifier, assert_equal_trees, loader, samples, trainer
from torch import Tensor

pytestmark = pytest.mark.usefixtures("on", "one_thread")

N = 51  # in batches of 17, of which three replicas get 6, 6 and 5 samples
SIZES: dict[str, Callable[[Tensor], Any]] = {
    "none": lambda x: None,
    "samples": len,
    "one": lambda x: 1,
    "constant": lambda x: 64,
    "tokens": lambda x: 7 * len(x),
    "valid items": lambda x: int(valid(x).sum()),  # none on some shards
    "tensor": lambda x: valid(x).sum(),
}
VALUES: dict[str, Callable[[Tensor], Any]] = {
    "mean": lambda x: x.mean(),
    "sum": lambda x: x.sum(),
    "min": lambda x: x.min(),
    "max": lambda x: x.max(),
}
WHEN = {"step": (True, False), "epoch": (False, True), "both": (True, True)}
ROWS = ["/".join(row) for row in itertools.product(VALUES, SIZES, WHEN)]


def valid(x: Tensor) -> Tensor:
    return x[:, 0] > 1


def log_rows(module: Any, batch: Any, batch_idx: int, sizes: Any = tuple(SIZES)) -> None:
    x = batch[0]
    for reduce_fx, size, when in itertools.product(VALUES, sizes, WHEN):
        of_valid = size in ("valid items", "tensor") and reduce_fx == "mean"
        value = VALUES[reduce_fx](x[valid(x)] if of_valid else x)
        options = dict(zip(("on_step", "on_epoch"), WHEN[when], strict=True))
        n = SIZES[size](x)
        own = {} if n is None else {"batch_size": n}
        module.log(f"{reduce_fx}/{size}/{when}", value, reduce_fx=reduce_fx, **options, **own)


def log_others(module: Any, batch: Any, batch_idx: int) -> None:
    x = batch[0]
    module.log_dict({"float": x.mean().item(), "flag": True, "index": float(batch_idx)})
    module.log("numpy", np.float64(batch_idx + 0.1))
    module.log("by position", x.mean(), True, False)
    module.log("loader", x.mean(), prog_bar=True, logger=False, add_dataloader_idx=False)
    for column in (0, 1):
        module.log("twice", x[:, column].mean())
    value = x.mean()
    module.log("written to afterwards", value)
    value.zero_()


class Logging(Classifier):
    def __init__(self, step: Any) -> None:
        super().__init__()
        self.step = step

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.step(self, batch, batch_idx)
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.step(self, batch, batch_idx)


class History(Callback):
    """The logged values after every training batch."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, job: Any, *_: Any) -> None:
        self.rows.append({k: v.clone() for k, v in job.callback_metrics.items()})


@cache
def logged(step: Any, devices: int, on: str) -> list[dict[str, Tensor]]:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    history = History()
    job = trainer(devices, max_epochs=2, callbacks=[history], num_sanity_val_steps=0)
    module = Logging(step)
    job.fit(module, loader(N, 17), loader(N, 17))
    return [*history.rows, dict(job.callback_metrics)]


def values_of(rows: list[dict[str, Tensor]], name: str) -> list[dict[str, Tensor]]:
    names = [name, f"{name}_step", f"{name}_epoch"]
    return [{n: row[n] for n in names if n in row} for row in rows]


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.usefixtures("unchecked")
def test_a_logged_value_is_one_devices(row: str, on: str) -> None:
    actual, expected = (values_of(logged(log_rows, k, on), row) for k in (3, 1))
    assert expected[-1]
    assert_equal_trees(actual, expected, row, atol=1e-10, rtol=1e-10)


@pytest.mark.usefixtures("unchecked")
def test_other_ways_to_log_are_one_devices(on: str) -> None:
    actual, expected = (logged(log_others, k, on) for k in (3, 1))
    assert len(expected[-1]) == 8
    assert_equal_trees(actual, expected, "logged", atol=1e-10, rtol=1e-10)


FIRST = samples()[0][0][0].item()


def is_first(batch: Any) -> bool:
    """Whether a shard has the data set's first sample."""
    return bool((batch[0][:, 0] == FIRST).any())


MISTAKES: dict[str, tuple[Any, str]] = {
    "some replicas": (
        lambda module, batch, i: module.log("first", 1.0) if is_first(batch) else None,
        r"'first'.*got it from replica 0 on \S+:0 .*, but not from replica 1",
    ),
    "other options": (
        lambda module, batch, i: module.log("value", 1.0, prog_bar=is_first(batch)),
        r"self.log\('value'\).*prog_bar=True.*prog_bar=False",
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_what_replicas_log_differently_is_refused_by_name(case: str) -> None:
    step, text = MISTAKES[case]
    with pytest.raises(ValueError, match=text):
        trainer(2, num_sanity_val_steps=0).fit(Logging(step), loader(), loader())


def test_the_user_may_override_log() -> None:
    class Prefixed(Classifier):
        def log(self, name: str, *args: Any, **kwargs: Any) -> None:
            super().log(f"mine/{name}", *args, **kwargs)

    job = trainer(3, max_epochs=1)
    module = Prefixed()
    job.fit(module, loader(), loader())
    assert set(job.callback_metrics) >= {"mine/val/loss", "mine/train/loss"}
    assert "log" not in vars(module)
