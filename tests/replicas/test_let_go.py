"""What a run has made is let go with it, also if an error ends it that somebody keeps."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from support import oracle
from support.oracle import Classifier, loader
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

from lightning_dp import DataParallel, DataParallelStrategy

pytestmark = pytest.mark.usefixtures("on", "one_thread")


class Failing(Classifier):
    """Raises an error in one of its hooks."""

    def __init__(self, stage: str) -> None:
        super().__init__()
        self.stage = stage

    def at(self, stage: str) -> None:
        if stage == self.stage:
            raise ValueError

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.at("step" if batch_idx else "")
        return loss

    def on_before_backward(self, loss: Any) -> None:
        self.at("before backward")

    def on_train_batch_end(self, *args: Any) -> None:
        self.at("batch end")


class Keeping(Callback):
    """Keeps the error that has ended a run."""

    def on_exception(self, job: Any, module: Any, error: BaseException) -> None:
        self.error = error


def trained(mode: Any, stage: str) -> list[Any]:
    """References to what a run leaves behind that was ended in a stage, and is let go."""
    module, keeping = Failing(stage), Keeping()
    executor: Any = "threads" if stage == "step" else "inorder"
    strategy = DataParallelStrategy(mode=mode, executor=executor)
    job = oracle.trainer(3, strategy, callbacks=[keeping], max_epochs=1)
    with suppress(ValueError):
        job.fit(module, loader(), loader())
    return [weakref.ref(each) for each in (module, job, keeping)]


@pytest.mark.parametrize("stage", ["step", "before backward", "batch end", "nowhere"])
@pytest.mark.parametrize("mode", ["step", "forward"])
def test_a_run_that_an_error_has_ended_is_let_go(mode: str, stage: str) -> None:
    hooks = set(torch_optimizer._global_optimizer_post_hooks)
    left = trained(mode, stage)
    gc.collect()
    assert not any(each() for each in left)
    assert set(torch_optimizer._global_optimizer_post_hooks) <= hooks


@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_a_wrapper_that_is_dropped_is_let_go(stage: str) -> None:
    """With the error, which holds it, and which something holds that the module holds."""

    class Net(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) / (1 if stage == "backward" else [])

    def run() -> list[Any]:
        devices = oracle.devices_of(3)
        root = Net(3, 2).to(devices[0])
        net = DataParallel(root, devices)
        with pytest.raises((TypeError, ZeroDivisionError)) as caught:
            z = net(torch.randn(8, 3))
            z.register_hook(lambda gradient: 1 // 0)
            z.sum().backward()
        root.kept = [caught.value]
        return [weakref.ref(net), weakref.ref(root)]

    left = run()
    gc.collect()
    assert not any(each() for each in left)
