"""The same job of a published library on one device and on three, and how far the two are apart."""

from __future__ import annotations

import dataclasses
import importlib
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Any

import pytest
import torch
from support import oracle
from torch import Tensor, nn
from torchmetrics import Metric

import lightning_dp

REPLICAS = 3


@dataclass(frozen=True, eq=False)
class Job:
    """What is trained, on what, and how close the result has to be.

    `close_logs` is for logs that the library computes in single precision.
    `predict` is the library's own way to predict, if it has one: it gets the options of a Trainer.
    `warns` has patterns of the warnings that several devices give and one device does not.
    """

    library: str
    model: str
    make: Callable[[], Any]
    data: Callable[[], Any]
    evaluated: Callable[[], Any] | None = None
    epochs: int = 6
    trainer: Mapping[str, Any] = field(default_factory=dict)
    close: float = 1e-9
    close_logs: float | None = None
    predict: Callable[[Any, dict[str, Any]], Any] | None = None
    package: str = "lightning"
    warns: tuple[str, ...] = ()

    def row(self, mode: str, on: str, found: Difference) -> list[Any]:
        """The row of the table that a run ends with."""
        return [self.library, self.model, mode, f"{REPLICAS} x {on}", *dataclasses.astuple(found)]


@dataclass
class Outcome:
    """What a job left behind, as trees of tensors and numbers on the CPU."""

    parameters: dict[str, Any]
    logs: list[Any]
    predictions: Any
    steps: int
    moved: float  # how far training has moved the parameters
    samples: list[int]  # of each device, in training
    warned: list[str]


@dataclass
class Difference:
    """The largest distance between what two runs left behind."""

    steps: int
    parameters: float
    logs: float
    predictions: float


def package(name: str) -> tuple[Any, Any, Any]:
    """The Trainer and the strategy of one of the two packages, and a logger that keeps its rows."""
    theirs = importlib.import_module({"lightning": "lightning.pytorch"}.get(name, name))
    ours: Any = lightning_dp
    if name != "lightning":
        ours = importlib.import_module(f"lightning_dp.{name}")
        importlib.import_module(f"sim_devices.{name}")  # the accelerator

    class Rows(theirs.loggers.logger.Logger):
        name, version = "rows", 0

        def __init__(self) -> None:
            super().__init__()
            self.rows: list[tuple[int | None, dict[str, float]]] = []

        def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
            return None

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            self.rows.append((step, {k: float(v) for k, v in metrics.items()}))

    return theirs.Trainer, ours.DataParallelStrategy, Rows()


def train(job: Job, devices: int, on: str, trainer: Mapping[str, Any], **options: Any) -> Outcome:
    """Fits, validates and predicts from one seed."""
    trainer_class, strategy, logger = package(job.package)

    def plan() -> Any:
        return "auto" if devices == 1 else strategy(**options)

    here = {**oracle.QUIET, "accelerator": on, "devices": devices, **job.trainer, **trainer}
    fit = {"max_epochs": job.epochs, "log_every_n_steps": 1, "logger": logger}
    evaluated = job.evaluated or job.data
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.manual_seed(0)
        module = job.make()
        module.apply(in_double)
        before = {name: p.detach().double().clone() for name, p in module.named_parameters()}
        its = trainer_class(strategy=plan(), **{**here, **fit})
        its.fit(module, job.data(), evaluated())
        metrics = dict(its.callback_metrics)
        validated = its.validate(module, evaluated(), verbose=False)
        if job.predict is None:
            predictions = its.predict(module, evaluated())
        else:
            predictions = job.predict(module, {**here, "strategy": plan()})
    return Outcome(
        parameters=dict(module.state_dict()),
        logs=[logger.rows, metrics, validated],
        predictions=predictions,
        steps=its.global_step,
        moved=max(_apart(p.double(), before[name], name) for name, p in module.named_parameters()),
        samples=[device.samples for device in getattr(its.strategy, "usage", ())],
        warned=[str(w.message) for w in caught],
    )


def in_double(module: nn.Module) -> None:
    """Metrics keep their precision unless told otherwise."""
    if isinstance(module, Metric):
        module.set_dtype(torch.float64)


@cache
def on_one_device(job: Job) -> Outcome:
    """The oracle."""
    return train(job, 1, "cpu", {})


def compare(
    job: Job, on: str, trainer: Mapping[str, Any] = MappingProxyType({}), **options: Any
) -> Difference:
    """Trains on one device and on three, and asserts that nothing is further apart than allowed.

    The Trainer of the three gets further arguments, and their strategy these options.
    """
    expected = on_one_device(job)
    actual = train(job, REPLICAS, on, trainer, **options)
    assert actual.steps == expected.steps >= 24 and expected.moved > 1e-2
    assert len(actual.samples) == REPLICAS and all(actual.samples), actual.samples
    found = Difference(
        actual.steps,
        distance(actual.parameters, expected.parameters, "parameters"),
        distance(actual.logs, expected.logs, "logs"),
        distance(actual.predictions, expected.predictions, "predictions"),
    )
    unexplained = [
        text
        for text in actual.warned
        if text not in expected.warned and not any(re.search(p, text) for p in job.warns)
    ]
    assert not unexplained, f"{found}\n" + "\n".join(unexplained)
    assert max(found.parameters, found.predictions) <= job.close, found
    assert found.logs <= (job.close_logs or job.close), found
    return found


def as_one_device(*cases: tuple[Job, dict[str, Any]]) -> Any:
    """A test that trains jobs with options of the strategy (`trainer`: those of a Trainer)."""
    ids = [f"{job.model}-{options.get('mode', 'step')}" for job, options in cases]

    @pytest.mark.parametrize(("job", "options"), cases, ids=ids)
    def test(on: str, job: Job, options: dict[str, Any], record_property: Any) -> None:
        found = compare(job, on, **options)
        record_property("interop", job.row(options.get("mode", "step"), on, found))

    return test


def distance(actual: Any, expected: Any, name: str) -> float:
    """The largest distance of two trees' numbers; the trees have to be alike."""
    return max(_distances(actual, expected, name), default=0.0)


def _distances(actual: Any, expected: Any, name: str) -> Iterator[float]:
    assert type(actual) is type(expected), f"{name}: {type(actual)} is not {type(expected)}"
    if isinstance(expected, Tensor):
        yield _apart(actual, expected, name)
    elif isinstance(expected, Mapping):
        assert list(actual) == list(expected), f"{name}: {list(actual)} is not {list(expected)}"
        for key in expected:
            yield from _distances(actual[key], expected[key], f"{name}[{key!r}]")
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected), f"{name}: {len(actual)} items, not {len(expected)}"
        for i, pair in enumerate(zip(actual, expected, strict=True)):
            yield from _distances(*pair, f"{name}[{i}]")
    elif dataclasses.is_dataclass(expected):
        for f in dataclasses.fields(expected):
            pair = (getattr(actual, f.name), getattr(expected, f.name))
            yield from _distances(*pair, f"{name}.{f.name}")
    elif isinstance(expected, float):
        yield _apart(torch.tensor(actual), torch.tensor(expected), name)
    elif type(expected).__module__ == "numpy":
        yield _apart(torch.as_tensor(actual), torch.as_tensor(expected), name)
    else:
        assert actual == expected, f"{name}: {actual!r} is not {expected!r}"


def _apart(actual: Tensor, expected: Tensor, name: str) -> float:
    actual, expected = actual.detach().cpu(), expected.detach().cpu()
    assert actual.shape == expected.shape, f"{name}: {actual.shape} is not {expected.shape}"
    assert actual.dtype == expected.dtype, f"{name}: {actual.dtype} is not {expected.dtype}"
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    apart = (actual.double() - expected.double()).abs().masked_fill(same, 0.0)
    worst = apart.max().item() if apart.numel() else 0.0
    return float("inf") if worst != worst else worst
