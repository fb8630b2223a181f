"""One device as the oracle: run the same job on one device and on several, and compare."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import DataParallelStrategy

SIM_DEVICES = 8  # their number is fixed for a process
ON = "cpu"  # "sim" while a test runs on simulated devices; the oracle is always the CPU
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
    """The devices of K replicas: one CPU K times, or K simulated devices."""
    return [torch.device("cpu")] * k if ON == "cpu" else [torch.device("sim", i) for i in range(k)]


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
    accelerator = "cpu" if devices == 1 else ON
    options = {**QUIET, **own, "accelerator": accelerator, **kwargs}
    return Trainer(strategy=strategy, devices=devices, **options)


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
    torch.manual_seed(0)
    module = make()
    job = trainer(devices, DataParallelStrategy(**(strategy or {})), **kwargs)
    job.fit(module, data(), data())
    result = Run(module, job, dict(job.callback_metrics), dict(job.logged_metrics))
    result.validated = job.validate(module, data(), verbose=False)
    result.tested = job.test(module, data(), verbose=False)
    result.predictions = job.predict(module, data())
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
            **close,
            equal_nan=True,
            msg=lambda text: f"{name}: {text}",
        )
    elif isinstance(expected, float):
        near = close["atol"] + close["rtol"] * abs(expected)
        assert actual == expected or abs(actual - expected) <= near, name
    elif type(expected).__module__ == "numpy":
        assert_equal_trees(torch.as_tensor(actual), torch.as_tensor(expected), name, **close)
    else:
        assert actual == expected, name


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.cpu() for name, p in module.named_parameters()}
