"""Replicas compute with the latest weights, whoever wrote them and whoever has worked meanwhile."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from support.oracle import Classifier, assert_same, devices_of, gradients, run
from torch import Tensor, nn

from lightning_dp.parallel.step import StepParallel

pytestmark = pytest.mark.usefixtures("on", "one_thread")

CPU = torch.device("cpu")


class Net(nn.Module):
    """Its step reads a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()
        self.register_buffer("scale", torch.ones(4, dtype=torch.float64))

    def training_step(self, batch: Tensor) -> Tensor:
        return self.net(batch * self.scale).square().mean()

    def predict_step(self, batch: Tensor) -> Tensor:
        return self.net(batch * self.scale)


@contextmanager
def engine_of(module: nn.Module, split: Any = (4, 1, 1)) -> Iterator[StepParallel]:
    """Three devices, of which only the first has samples of a batch of one."""
    devices, place = devices_of(3), lambda n: (n, 0, 0) if n < 3 else split
    engine = StepParallel(module.to(devices[0]), devices, output_device=CPU, split=place)
    yield engine
    engine.close()


def halve(tensor: Tensor) -> None:
    """Leaves no trace in a version counter."""
    tensor.data.mul_(0.5)


def test_a_replica_that_sat_out_the_step_after_a_resync_has_them() -> None:
    oracle = Net()
    with engine_of(copy.deepcopy(oracle)) as engine, torch.no_grad():
        for resyncs, samples in ((False, 6), (True, 1), (False, 6)):
            if resyncs:  # somebody says that there are others
                for module in (engine.module, oracle):
                    list(map(halve, module.parameters()))
                engine.resync()
            batch = torch.randn(samples, 4, dtype=torch.float64)
            predicted = engine.evaluate("predict_step", batch)
            torch.testing.assert_close(predicted, oracle.predict_step(batch))


def thaw(net: Net) -> None:
    """A frozen weight is written to, and trained from then on."""
    if not net.net[0].weight.requires_grad:
        halve(net.net[0].weight)
        net.net[0].requires_grad_(True)


@pytest.mark.parametrize("change", [thaw, lambda net: halve(net.scale)], ids=["thaw", "buffer"])
def test_what_was_written_without_a_trace_reaches_training_replicas(
    change: Callable[[Net], None],
) -> None:
    oracle, batch = Net(), torch.randn(6, 4, dtype=torch.float64)
    oracle.net[0].requires_grad_(False)
    with engine_of(copy.deepcopy(oracle)) as engine:
        for _ in range(3):
            for module in (engine.module, oracle):
                module.zero_grad()
            engine.train("training_step", batch).backward()
            oracle.training_step(batch).backward()
            expected, found = gradients(oracle), gradients(engine.module)
            for name, gradient in expected.items():
                torch.testing.assert_close(found[name], gradient, msg=name)
            for module in (engine.module, oracle):
                change(module)


class Fused(Classifier):
    """Its optimizer writes weights by a kernel of its own, which no version of these counts."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), self.lr, fused=True)


class Frozen(Classifier):
    """Replicas are sent trained weights after any training step, but not frozen ones."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)


class Swaps(Callback):
    """Validates with other weights, and writes them where no version counts it."""

    @torch.no_grad()
    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self.kept = [parameter.clone() for parameter in module.parameters()]
        list(map(halve, module.parameters()))

    @torch.no_grad()
    def on_validation_end(self, trainer: Any, module: Any) -> None:
        for parameter, kept in zip(module.parameters(), self.kept, strict=True):
            parameter.data.copy_(kept)


RUNS: dict[str, tuple[Any, str, Callable[[], dict[str, Any]]]] = {
    "that a fused optimizer has written": (Fused, "step", dict),
    **{
        f"that a callback swaps for a validation in mid-epoch, {mode}": (
            Frozen,
            mode,
            lambda: {"callbacks": [Swaps()], "val_check_interval": 1, "accumulate_grad_batches": 3},
        )
        for mode in ("step", "forward")
    },
}


@pytest.mark.parametrize("case", RUNS)
def test_weights(case: str) -> None:
    kind, mode, options = RUNS[case]
    found = run(kind, 3, precision="64-true", strategy={"mode": mode}, **options())
    assert_same(found, run(kind, 1, precision="64-true", **options()), atol=1e-9)
