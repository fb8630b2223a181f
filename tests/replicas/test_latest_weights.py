"""Replicas compute with the latest weights, whoever wrote them and whoever has worked meanwhile."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from support.oracle import Classifier, assert_same, devices_of, gradients, loader, run
from torch import Tensor, nn

from lightning_dp.parallel.step import StepParallel

pytestmark = pytest.mark.usefixtures("on", "one_thread")

CPU = torch.device("cpu")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()

    def training_step(self, batch: Tensor) -> Tensor:
        return self.net(batch).square().mean()

    def predict_step(self, batch: Tensor) -> Tensor:
        return self.net(batch)


@contextmanager
def engine_of(module: nn.Module) -> Iterator[StepParallel]:
    """Three devices, of which only the first has samples of a batch of one."""
    devices = devices_of(3)
    engine = StepParallel(
        module.to(devices[0]),
        devices,
        output_device=CPU,
        split=lambda n: (n, 0, 0) if n < 3 else (n - 2, 1, 1),
    )
    try:
        yield engine
    finally:
        engine.close()


def assert_predicts_as(engine: StepParallel, oracle: Any, samples: int) -> None:
    batch = torch.randn(samples, 4, dtype=torch.float64)
    with torch.no_grad():
        predicted = engine.evaluate("predict_step", batch)
        torch.testing.assert_close(predicted, oracle.predict_step(batch))


def test_a_replica_that_sat_out_the_step_after_a_resync_has_them() -> None:
    oracle = Net()
    with engine_of(copy.deepcopy(oracle)) as engine:
        assert_predicts_as(engine, oracle, 6)
        for module in (engine.module, oracle):
            for parameter in module.parameters():
                parameter.data.mul_(0.5)  # which leaves no trace, so that somebody says it
        engine.resync()
        assert_predicts_as(engine, oracle, 1)
        assert_predicts_as(engine, oracle, 6)


def test_frozen_weights_that_were_written_without_a_trace_are_right_once_they_train() -> None:
    oracle, batch = Net(), torch.randn(6, 4, dtype=torch.float64)
    oracle.net[0].requires_grad_(False)
    with engine_of(copy.deepcopy(oracle)) as engine:
        engine.train("training_step", batch).backward()
        oracle.training_step(batch).backward()
        for module in (engine.module, oracle):
            module.zero_grad()
            module.net[0].weight.data.mul_(0.5)
            module.net[0].requires_grad_(True)
        engine.train("training_step", batch).backward()
        oracle.training_step(batch).backward()
        expected, found = gradients(oracle), gradients(engine.module)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, msg=name)


class Scaled(Net):
    """Its step reads a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(4, dtype=torch.float64))

    def training_step(self, batch: Tensor) -> Tensor:
        return super().training_step(batch * self.scale)


class Summing(Net):
    """Its step writes a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def training_step(self, batch: Tensor) -> Tensor:
        self.seen.fill_(float(batch.sum()))
        return super().training_step(batch)


def test_buffers_that_were_written_without_a_trace_reach_training_replicas() -> None:
    oracle, batch = Scaled(), torch.randn(6, 4, dtype=torch.float64)
    with engine_of(copy.deepcopy(oracle)) as engine:
        for _ in range(4):
            for module in (engine.module, oracle):
                module.zero_grad()
            engine.train("training_step", batch).backward()
            oracle.training_step(batch).backward()
            expected, found = gradients(oracle), gradients(engine.module)
            for name, gradient in expected.items():
                torch.testing.assert_close(found[name], gradient, msg=name)
            for module in (engine.module, oracle):
                module.scale.data.mul_(0.5)


@pytest.mark.filterwarnings("ignore:A step leaves buffers different")
@pytest.mark.parametrize("sizes", [(4, 1, 1), (0, 4, 2)])
def test_the_root_has_the_buffers_of_the_first_replica_with_samples(sizes: tuple[int, ...]) -> None:
    devices, batch = devices_of(3), torch.randn(6, 4, dtype=torch.float64)
    module = Summing().to(devices[0])
    engine = StepParallel(module, devices, output_device=CPU, split=lambda n: sizes)
    engine.train("training_step", batch).backward()
    engine.close()
    torch.testing.assert_close(float(module.seen), float(batch[:4].sum()))


class Fused(Classifier):
    """Its optimizer writes weights by a kernel of its own, which no version of these counts."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), self.lr, fused=True)


def test_those_that_a_fused_optimizer_has_written() -> None:
    options = {"precision": "64-true"}
    assert_same(run(Fused, 3, **options), run(Fused, 1, **options), atol=1e-9)


class Swaps(Callback):
    """Validates with other weights, and writes them where no version counts it."""

    @torch.no_grad()
    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self.kept = [parameter.clone() for parameter in module.parameters()]
        for parameter in module.parameters():
            parameter.data.copy_(0.5 * parameter)

    @torch.no_grad()
    def on_validation_end(self, trainer: Any, module: Any) -> None:
        for parameter, kept in zip(module.parameters(), self.kept, strict=True):
            parameter.data.copy_(kept)


@pytest.mark.parametrize("mode", ["step", "forward"])
def test_those_that_a_callback_puts_back_after_a_validation_in_the_middle_of_an_epoch(
    mode: str,
) -> None:
    options = {"precision": "64-true", "val_check_interval": 1, "accumulate_grad_batches": 3}
    found, expected = [
        run(Classifier, k, callbacks=[Swaps()], **options, **strategy)
        for k, strategy in ((3, {"strategy": {"mode": mode}}), (1, {}))
    ]
    assert_same(found, expected, atol=1e-10)


class SkipsTheLast(Classifier):
    """The last micro-batch of each step of the optimizer has no loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 2 else loss


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_gradients_that_have_accumulated_count_if_the_last_step_has_no_loss() -> None:
    options = {"precision": "64-true", "accumulate_grad_batches": 2, "data": lambda: loader(100)}
    found = run(SkipsTheLast, 3, **options)
    assert_same(found, run(SkipsTheLast, 1, **options), atol=1e-10)
