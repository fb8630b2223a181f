"""Whoever looks at gradients between micro-batches, or empties them, does what one device does."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from oracle import Classifier, assert_equal_trees, loader, trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import DataParallelStrategy, between_steps
from lightning_dp.parallel.gradients import reduce, reduce_gradients

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


# Those that look after each backward


class GradNorm(Plain):
    def on_after_backward(self) -> None:
        norms = torch.stack([p.grad.norm() for p in self.parameters()])
        self.log("norm", norms.norm(), on_step=False, on_epoch=True)


class Clip(Plain):
    def on_after_backward(self) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.1)


class NanSkip(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (float("nan") if batch_idx == 0 else 1.0)

    def on_after_backward(self) -> None:
        if not all(p.grad.isfinite().all() for p in self.parameters()):
            self.zero_grad()


class OwnBackward(Plain):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()
        nn.utils.clip_grad_value_(self.parameters(), 0.01)


def clip(trainer: Any, module: nn.Module) -> None:
    nn.utils.clip_grad_norm_(module.parameters(), 0.1)


class ClipsInCallback(Callback):
    on_after_backward = staticmethod(clip)


def assigned() -> Plain:
    module = Plain()
    vars(module)["on_after_backward"] = partial(clip, None, module)
    return module


# Those that look before the next batch


class Reads(Plain):
    def norms(self) -> Tensor:
        return torch.stack([p.grad.norm() if p.grad is not None else p.new_zeros(()) for p in self])

    def __iter__(self) -> Any:
        return self.parameters()

    def on_train_batch_end(self, *_: Any) -> None:
        self.log("norm", self.norms().norm(), on_step=False, on_epoch=True)


class ReadsBefore(Plain):
    def on_before_backward(self, loss: Tensor) -> None:
        total = sum(p.grad.sum() for p in self.parameters() if p.grad is not None)
        self.log("sum", torch.tensor(float(total)), on_step=False, on_epoch=True)


class Scales(Plain):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for p in self.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)


# Those that empty them


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


class ZeroByNames(Plain):
    """Its code does not name gradients."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            for p in self.parameters():
                setattr(p, "".join(["gr", "ad"]), None)


CASES: dict[str, tuple[Callable[[], LightningModule], list[Any]]] = {
    **{
        make.__name__: (make, [])
        for make in (
            *(GradNorm, Clip, NanSkip, OwnBackward, Reads, ReadsBefore, Scales),
            *(ZeroGrad, ZeroInPlace, ZeroBefore, ZeroBeforeBackward, ZeroLayer, ZeroByNames),
        )
    },
    "a callback": (Plain, [ClipsInCallback]),
    "Lightning's callback with a function": (
        Plain,
        [lambda: LambdaCallback(on_after_backward=clip)],
    ),
    "assigned on the instance": (assigned, []),
}


def fit(job: Trainer, module: LightningModule, data: Any = None) -> None:
    data = data or loader(n=22, batch_size=7)
    job.limit_val_batches = 0
    job.fit(module, data, data)


def fitted(
    make: Callable[[], LightningModule],
    devices: int,
    *,
    accumulate: int = 2,
    callbacks: Any = (),
    data: Any = None,
    **options: Any,
) -> dict[str, Any]:
    """Weights and metrics after two epochs of 7, 7, 7 and 1 samples."""
    torch.manual_seed(0)
    module = make()
    job = trainer(
        devices,
        DataParallelStrategy(**options),
        accumulate_grad_batches=accumulate,
        callbacks=[callback() for callback in callbacks],
    )
    fit(job, module, data)
    return {"weights": module.state_dict(), "metrics": dict(job.callback_metrics)}


@pytest.mark.parametrize(
    "devices, accumulate, executor, split",
    [
        (2, 2, "threads", "even"),
        (3, 3, "inorder", "even"),
        (3, 2, "threads", "adaptive"),
        (2, 3, "inorder", "adaptive"),
    ],
)
@pytest.mark.parametrize("case", CASES)
def test_gradients_between_micro_batches_are_one_devices(
    case: str, devices: int, accumulate: int, executor: Any, split: Any
) -> None:
    make, callbacks = CASES[case]
    result = partial(fitted, make, accumulate=accumulate, callbacks=callbacks)
    assert_equal_trees(result(devices, executor=executor, split=split), result(1), case, **CLOSE)


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


@pytest.mark.parametrize("executor", ["threads", "inorder"])
def test_gradients_that_only_other_replicas_have_are_emptied_too(executor: Any) -> None:
    x = torch.randn(24, 10, generator=torch.Generator().manual_seed(1))
    x[:, 0] = torch.tensor([-1.0] * 5 + [1.0]).repeat(4)
    data = DataLoader(TensorDataset(x, torch.arange(24) % 3), batch_size=6)
    result = partial(fitted, Expert, accumulate=2, data=data)
    assert_equal_trees(result(3, executor=executor), result(1), "expert", **CLOSE)


# Changes that nobody can follow


class ScalesByName(Plain):
    """Nothing tells before it is done. Weights stay, so that later steps are alike."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for p in self.parameters():
            gradient = getattr(p, "".join(["gr", "ad"]))
            if gradient is not None:
                gradient.mul_(0.5)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append(self.net[0].weight.grad.cpu().clone())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.0)


def scaled(devices: int) -> tuple[list[Tensor], list[str]]:
    torch.manual_seed(0)
    module = ScalesByName()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        strategy = DataParallelStrategy(executor="threads")
        job = trainer(devices, strategy, accumulate_grad_batches=2)
        fit(job, module)
    return module.seen, [str(w.message) for w in told if "micro-batch" in str(w.message)]


@pytest.mark.parametrize("devices", [2, 3])
def test_what_cannot_be_followed_is_told_once_and_right_from_then_on(devices: int) -> None:
    (expected, nothing), (seen, told) = scaled(1), scaled(devices)
    assert_equal_trees(seen[1:], expected[1:], "after the first step", **CLOSE)
    assert not nothing and len(told) == 1
    assert "this step of the optimizer is not one device's" in told[0]


# What it costs


class Harmless(Callback):
    def on_train_batch_end(self, *_: Any) -> None:
        torch.no_grad()


@pytest.mark.parametrize(
    "make, expected", [(Plain, {1, 3}), (ZeroGrad, {1, 3}), (Clip, {*range(4)})]
)
def test_gradients_stay_until_the_last_micro_batch_where_nobody_looks(
    make: Any, expected: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: set[int] = set()

    def reduced(*args: Any) -> None:
        batches.add(job.fit_loop.batch_idx)
        reduce_gradients(*args)

    monkeypatch.setattr(reduce, "reduce_gradients", reduced)
    asked = mock.Mock(wraps=between_steps.sees_gradients)
    monkeypatch.setattr(between_steps, "sees_gradients", asked)
    strategy = DataParallelStrategy(executor="threads")
    job = trainer(2, strategy, accumulate_grad_batches=2, max_epochs=1, callbacks=[Harmless()])
    fit(job, make())
    assert batches == expected
    assert asked.call_count == 1


def test_without_accumulation_nobody_asks() -> None:
    with mock.patch.object(between_steps, "sees_gradients") as asked:
        fit(trainer(2, max_epochs=1), Clip())
    assert not asked.called
