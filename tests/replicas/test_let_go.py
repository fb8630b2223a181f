"""What a run has made is let go with it, also if an error ends it that somebody keeps."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress
from itertools import cycle, product
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from support import oracle
from support.oracle import ByHand, Classifier, loader
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

from lightning_dp import DataParallel, DataParallelStrategy
from lightning_dp.parallel.replicate import Replicas

STAGES = (
    "step",
    "logged",
    "on_train_batch_start",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "optimizer_step",
    "on_train_batch_end",
    "nowhere",
)
NOT_BY_HAND = ("on_before_zero_grad", "optimizer_step")
DEVICES = 3


class Failing(Classifier):
    def __init__(self, stage: str, kind: type[BaseException]) -> None:
        super().__init__()
        self.stage, self.kind = stage, kind

    def at(self, stage: str) -> None:
        if stage == self.stage:
            raise self.kind

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            self.at("step")
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1:
            self.at("logged")
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.at("on_train_batch_start")

    def on_before_backward(self, loss: Any) -> None:
        self.at("on_before_backward")

    def on_after_backward(self) -> None:
        self.at("on_after_backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.at("on_before_optimizer_step")

    def optimizer_step(self, *args: Any) -> None:
        super().optimizer_step(*args)
        self.at("optimizer_step")

    def on_train_batch_end(self, *args: Any) -> None:
        self.at("on_train_batch_end")


class FailingByHand(ByHand, Failing):
    pass


class Keeping(Callback):
    """Keeps the error that has ended a run."""

    error: BaseException | None = None

    def on_exception(self, job: Any, module: Any, error: BaseException) -> None:
        self.error = error


def trained(mode: str, executor: Any, devices: int, stage: str, kind: Any) -> list[Any]:
    """References to what a run leaves behind that was ended in a stage, and is let go."""
    made = FailingByHand if mode == "by hand" else Failing
    strategy: Any = "auto"
    if devices > 1:
        how: Any = "forward" if mode == "forward" else "step"
        strategy = DataParallelStrategy(mode=how, executor=executor)
    module, keeping = made(stage, kind), Keeping()
    job = oracle.trainer(devices, strategy, callbacks=[keeping], max_epochs=1)
    end = (kind, SystemExit) if stage != "nowhere" else ()
    with suppress(*end):
        job.fit(module, loader(), loader())
    assert (keeping.error is None) == (stage == "nowhere")
    return [weakref.ref(each) for each in (module, job, keeping)]


@pytest.fixture
def replicas(monkeypatch: pytest.MonkeyPatch) -> weakref.WeakSet[Replicas]:
    """All that are made, and live."""
    living: weakref.WeakSet[Replicas] = weakref.WeakSet()
    made = Replicas.__init__

    def make(self: Replicas, *args: Any, **options: Any) -> None:
        living.add(self)
        made(self, *args, **options)

    monkeypatch.setattr(Replicas, "__init__", make)
    return living


def ways(mode: str) -> list[tuple[str, str, type[BaseException]]]:
    """All stages, by either executor, with either error in turn."""
    stages = [stage for stage in STAGES if mode != "by hand" or stage not in NOT_BY_HAND]
    turns = cycle([*product(("threads", "inorder"), (ValueError, KeyboardInterrupt))])
    return [(stage, *turn) for stage, turn in zip(stages, turns, strict=False)]


@pytest.mark.parametrize("mode", ["step", "by hand", "forward"])
@pytest.mark.usefixtures("on", "one_thread")
def test_a_run_that_an_error_has_ended_is_let_go(
    mode: str, replicas: weakref.WeakSet[Replicas]
) -> None:
    hooks, kept = set(torch_optimizer._global_optimizer_post_hooks), []
    for stage, executor, kind in ways(mode):
        for devices in (1, DEVICES):
            left = trained(mode, executor, devices, stage, kind)
            gc.collect()
            if living := [type(each()).__name__ for each in left if each()]:
                kept.append((stage, executor, kind, devices, living))
            assert not replicas or living
            replicas.clear()
    assert not kept
    # What another test has left may have been let go in the meantime.
    assert set(torch_optimizer._global_optimizer_post_hooks) <= hooks


class Net(nn.Sequential):
    """Fails in its forward, or after it."""

    stage = "nowhere"

    def forward(self, x: Tensor) -> Tensor:
        if self.stage == "before":
            raise ValueError
        z = super().forward(x)
        if self.stage == "after":
            raise ValueError
        return z


@pytest.mark.parametrize("stage", ["before", "after", "outside", "backward", "nowhere"])
@pytest.mark.parametrize("executor", ["threads", "inorder"])
@pytest.mark.usefixtures("on", "one_thread")
def test_a_wrapper_that_is_dropped_is_let_go(
    stage: str, executor: Any, replicas: weakref.WeakSet[Replicas]
) -> None:
    """With the error, which holds it, and which something holds that the module holds."""

    def call(net: Any, root: Net) -> None:
        z = net(torch.randn(8, 3))
        if stage == "outside":
            raise ValueError
        if stage == "backward":
            z.register_hook(lambda gradient: 1 // 0)
        z.sum().backward()
        if stage == "nowhere":
            raise ValueError

    def run() -> list[Any]:
        root = Net(nn.Linear(3, 2), nn.Tanh())
        root.stage = stage
        root.kept = []
        devices = oracle.devices_of(DEVICES)
        net = DataParallel(root.to(devices[0]), devices, executor=executor)
        try:
            call(net, root)
        except (ValueError, ZeroDivisionError) as error:
            root.kept.append(error)
        assert root.kept
        return [weakref.ref(net), weakref.ref(root)]

    left = run()
    gc.collect()
    assert not any(each() for each in left)
    assert not replicas
