"""Between micro-batches gradients are the replicas'; whoever clears the root's clears them all."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from oracle import Classifier, assert_equal_trees, loader, trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import DataParallelStrategy

pytestmark = pytest.mark.usefixtures("on", "one_thread")

CLOSE = {"atol": 1e-10, "rtol": 1e-8}


@pytest.fixture(autouse=True)
def _in_double_precision() -> None:
    torch.set_default_dtype(torch.float64)


class Plain(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.5)


class ZeroGrad(Plain):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.zero_grad()


class ZeroInPlace(Plain):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.zero_grad(set_to_none=False)


class ZeroBefore(Plain):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.trainer.optimizers[0].zero_grad()


class ZeroBeforeBackward(Plain):
    def on_before_backward(self, loss: Tensor) -> None:
        if self.trainer.fit_loop.batch_idx == 1:
            self.zero_grad()


class ZeroLayer(Plain):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.net[2].zero_grad()


class Expert(ZeroGrad):
    """Some samples go through another layer: of a batch's the first replica has none."""

    def __init__(self) -> None:
        super().__init__()
        self.expert = nn.Linear(3, 3)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        out = self(x)
        chosen = x[:, 0] > 0
        if chosen.any():
            out = torch.where(chosen[:, None], self.expert(out), out)
        return F.cross_entropy(out, y)


class Clips(Plain):
    """Where it may: when the sums are there."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.1)


def fitted(make: type[Plain], devices: int, data: Any = None, **options: Any) -> Any:
    """Weights and metrics after two epochs of 7, 7, 7 and 1 samples."""
    torch.manual_seed(0)
    module, data = make(), data or loader(n=22, batch_size=7)
    strategy = DataParallelStrategy(**options)
    job = trainer(devices, strategy, accumulate_grad_batches=2, limit_val_batches=0)
    job.fit(module, data, data)
    return {"weights": module.state_dict(), "metrics": dict(job.callback_metrics)}


@pytest.mark.parametrize("executor", ["threads", "inorder"])
@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize(
    "make", [Plain, ZeroGrad, ZeroInPlace, ZeroBefore, ZeroBeforeBackward, ZeroLayer, Clips]
)
def test_a_fit_is_that_of_one_device(make: type[Plain], devices: int, executor: Any) -> None:
    assert_equal_trees(fitted(make, devices, executor=executor), fitted(make, 1), "fit", **CLOSE)


@pytest.mark.parametrize("executor", ["threads", "inorder"])
def test_gradients_that_only_other_replicas_have_are_cleared_too(executor: Any) -> None:
    x = torch.randn(24, 10, generator=torch.Generator().manual_seed(1))
    x[:, 0] = torch.tensor([-1.0] * 5 + [1.0]).repeat(4)
    data = DataLoader(TensorDataset(x, torch.arange(24) % 3), batch_size=6)
    result = partial(fitted, Expert, data=data)
    assert_equal_trees(result(3, executor=executor), result(1), "expert", **CLOSE)
