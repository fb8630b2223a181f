"""One device as the oracle: run the same job on one device and on several, and compare."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.strategies import StrategyRegistry
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import DataParallelStrategy
from lightning_dp.parallel.devices import replica_names
from lightning_dp.parallel.gather import gather
from lightning_dp.strategy import DataParallelMixin
from support import device_kinds

ON = "cpu"  # the kind of devices a test is on (see `device_kinds`); the oracle is always the CPU
TOGETHER = False  # whether several processes run the same test, see `processes`
EPOCHS = 2  # what an epoch leaves must reach the next one
SAMPLES = 53  # in batches of 25: 25, 25 and a last batch of 3, smaller than K = 4
BATCH = 25


class Classifier(LightningModule):
    """A small classifier without dropout or batch norm, to be extended by what a test is about."""

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Any:
        return self.net(x)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val/loss", self.loss(batch))

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("test/loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), self.lr)


class ByHand:
    """Before a Classifier among the bases of a class: the same step with manual optimisation."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.automatic_optimization = False

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        optimizer.step()
        return loss


def devices_of(k: int) -> list[torch.device]:
    """The devices of K replicas, of the kind that the test is on."""
    return device_kinds.devices(ON, k)


def names_of(k: int) -> list[str]:
    """What replicas on these devices are called."""
    return replica_names(devices_of(k))


def accelerator() -> str:
    """What torch, and a Trainer, call the devices that the test is on: their type."""
    return device_kinds.type_of(ON)


def are_separate() -> bool:
    """Whether each replica has a device of its own, and with it parameters of its own."""
    return ON in device_kinds.SEPARATE


def on_devices(k: int, strategy: Any) -> dict[str, Any]:
    """What a Trainer is told, to be on K devices of the kind that the test is on."""
    if ON == "cuda":  # a Trainer takes no GPU twice; the strategy does
        if isinstance(strategy, str) and strategy.startswith("dp_custom"):
            strategy = StrategyRegistry.get(strategy)
        if isinstance(strategy, DataParallelMixin) and not strategy.parallel_devices:
            output = strategy._output_device
            if type(output) is int and 0 < output < k:
                pytest.skip(f"needs a GPU of id {output} for outputs, and is on one GPU {k} times")
            strategy.parallel_devices = devices_of(k)
        return {"accelerator": accelerator(), "devices": 1, "strategy": strategy}
    devices_of(k)  # skips the test if there are fewer
    return {"accelerator": accelerator(), "devices": k, "strategy": strategy}


def samples(n: int = SAMPLES, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 10, generator=generator)
    return TensorDataset(x, torch.randint(0, 3, (n,), generator=generator))


QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def loader(n: int = SAMPLES, batch_size: int = BATCH, **kwargs: Any) -> DataLoader[Any]:
    return DataLoader(samples(n), batch_size=batch_size, **kwargs)


def trainer(devices: int = 1, strategy: Any = "dp_custom", **kwargs: Any) -> Trainer:
    own = {"log_every_n_steps": 1, "max_epochs": EPOCHS}
    on_one = {"accelerator": "cpu", "devices": 1, "strategy": strategy}
    here = on_one if devices == 1 else on_devices(devices, strategy)
    if devices > 1 or not TOGETHER:
        return Trainer(**{**QUIET, **own, **here, **kwargs})
    with as_only_process():
        alone = Trainer(**{**QUIET, **own, **here, **kwargs})
    for name in ("fit", "validate", "test", "predict", "save_checkpoint"):
        setattr(alone, name, as_only_process()(getattr(alone, name)))
    return alone


def in_processes() -> bool:
    """Whether others run the same test, each with some of its devices."""
    return TOGETHER


@contextmanager
def as_only_process() -> Iterator[None]:
    """Meanwhile nothing tells of the processes that run the same test.

    A Trainer takes its environment away as it ends; metrics ask torch whether there are others.
    """
    told = ("TORCHELASTIC_", "RANK", "LOCAL_", "GROUP_", "WORLD_SIZE")
    others = {name: value for name, value in os.environ.items() if not name.startswith(told)}
    with (
        mock.patch.dict(os.environ, others, clear=True),
        mock.patch.object(torch.distributed, "is_initialized", return_value=False),
    ):
        yield


def predicted(job: Trainer, module: LightningModule, data: Any) -> Any:
    """What `predict` gives for all samples, in every process."""
    if job.world_size == 1:
        return job.predict(module, data)
    parts = _Predictions()
    job.callbacks.append(parts)
    job.predict(module, data)
    job.callbacks.remove(parts)
    ranks = job.strategy.world.all_gather_objects(parts.of_batches)
    joined = []
    for batch in zip(*ranks, strict=True):
        having = [(n, output) for n, output in batch if n]
        outputs = [output for _, output in having]
        joined.append(gather(outputs, "cpu", sizes=[n for n, _ in having]))
    return joined


class _Predictions(BasePredictionWriter):
    """This rank's number of samples and output of each batch."""

    def __init__(self) -> None:
        super().__init__("batch")
        self.of_batches: list[tuple[int, Any]] = []

    def write_on_batch_end(
        self, trainer: Any, _: Any, prediction: Any, indices: Any, *others: Any
    ) -> None:
        self.of_batches.append((len(indices), prediction))


def of_first(job: Trainer, value: Any) -> Any:
    """What the first of all processes has."""
    return value if job.world_size == 1 else job.strategy.broadcast(value)


@dataclass
class Run:
    """What a job left behind."""

    module: LightningModule
    trainer: Trainer
    callback_metrics: dict[str, Tensor] = field(default_factory=dict)
    logged_metrics: dict[str, Tensor] = field(default_factory=dict)
    validated: Any = None
    tested: Any = None
    predictions: Any = None


def run(
    make: Callable[[], LightningModule],
    devices: int,
    *,
    strategy: dict[str, Any] | None = None,
    data: Callable[[], Any] = loader,
    **kwargs: Any,
) -> Run:
    """Fits, validates, tests and predicts, always from the same seed."""
    with as_only_process() if TOGETHER and devices == 1 else nullcontext():
        torch.manual_seed(0)
        module = make()
        job = trainer(devices, DataParallelStrategy(**(strategy or {})), **kwargs)
        job.fit(module, data(), data())
        result = Run(module, job, dict(job.callback_metrics), dict(job.logged_metrics))
        result.validated = job.validate(module, data(), verbose=False)
        result.tested = job.test(module, data(), verbose=False)
        result.predictions = predicted(job, module, data())
        return result


def assert_same(run: Run, oracle: Run, *, atol: float = 1e-10, rtol: float = 0.0) -> None:
    """Parameters, buffers, metrics, results and predictions of two runs are equal."""
    close = {"atol": atol, "rtol": rtol}
    pairs = {
        "state": (run.module.state_dict(), oracle.module.state_dict()),
        "callback_metrics": (run.callback_metrics, oracle.callback_metrics),
        "logged_metrics": (run.logged_metrics, oracle.logged_metrics),
        "validate": (run.validated, oracle.validated),
        "test": (run.tested, oracle.tested),
        "predictions": (run.predictions, oracle.predictions),
    }
    for name, (actual, expected) in pairs.items():
        assert_equal_trees(actual, expected, name, **close)


def assert_as_one_device(
    use: Callable[[int], Any], devices: int = 3, *, atol: float = 1e-10
) -> Any:
    """Asserts that `use` returns for several devices what it does for one; returns that."""
    results = []
    for k in (devices, 1):
        torch.manual_seed(0)
        results.append(use(k))
    assert_equal_trees(*results, "results", atol=atol, rtol=0.0)
    return results[1]


GPU_ROUNDING = {
    torch.float64: 1e-10,
    torch.float32: 1e-5,
    torch.float16: 1e-2,
    torch.bfloat16: 1e-1,
}
"""How far numbers of a GPU may at least be from the CPU's, absolutely and relative to them.

A GPU adds up in an order of its own; these are some hundred roundings of numbers of about 1.
"""


def closeness(dtype: torch.dtype, atol: float = 0.0, rtol: float = 0.0) -> dict[str, float]:
    """How close is close enough on the devices that the test is on, for one that asks for this."""
    least = GPU_ROUNDING.get(dtype, 0.0) if ON in ("cuda", "multigpu") else 0.0
    return {"atol": max(atol, least), "rtol": max(rtol, least)}


def assert_close(actual: Tensor, expected: Tensor, atol: float = 0.0, rtol: float = 0.0) -> None:
    """Asserts that numbers are equal, wherever they are, or as close as a GPU comes to them."""
    assert actual.dtype == expected.dtype
    close = closeness(expected.dtype, atol, rtol)
    torch.testing.assert_close(actual.cpu(), expected.cpu(), **close, equal_nan=True)


def assert_equal_trees(actual: Any, expected: Any, name: str, **close: float) -> None:
    if isinstance(expected, Mapping):
        assert set(actual) == set(expected), name
        for key in expected:
            assert_equal_trees(actual[key], expected[key], f"{name}[{key!r}]", **close)
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected), name
        for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
            assert_equal_trees(a, b, f"{name}[{i}]", **close)
    elif isinstance(expected, Tensor):
        assert actual.shape == expected.shape and actual.dtype == expected.dtype, name
        torch.testing.assert_close(
            actual.cpu(),
            expected.cpu(),
            **closeness(expected.dtype, **close),
            equal_nan=True,
            msg=lambda text: f"{name}: {text}",
        )
    elif isinstance(expected, float):
        close = closeness(torch.get_default_dtype(), **close)
        near = close["atol"] + close["rtol"] * abs(expected)
        assert actual == expected or abs(actual - expected) <= near, name
    elif type(expected).__module__ == "numpy":
        assert_equal_trees(torch.as_tensor(actual), torch.as_tensor(expected), name, **close)
    else:
        assert actual == expected, name


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.cpu() for name, p in module.named_parameters()}
