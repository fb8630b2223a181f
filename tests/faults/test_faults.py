"""Faults in every stage of a step: the right error, no wait, no thread left, and it can go on."""

from __future__ import annotations

import faulthandler
import math
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from support import oracle
from support.forward_twins import said
from support.oracle import Classifier, loader
from support.waiting import not_kept
from torch import Tensor
from torch.nn import functional as F

from lightning_dp import DataParallelStrategy
from lightning_dp.parallel.apply import Executor, Task

pytestmark = pytest.mark.usefixtures("on", "one_thread")

DEVICES = 4
BATCH = 16  # 4 samples each

IN_REPLICAS = ("transfer", "after transfer", "step", "forward", "logging", "backward")
ON_THE_MAIN_THREAD = (
    "before transfer",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "reduce",
    "on_after_backward",
    "on_before_optimizer_step",
    "optimizer step",
    "on_train_batch_end",
)
STAGES = (*IN_REPLICAS, *ON_THE_MAIN_THREAD)


class FaultError(Exception):
    """With arguments of its own, as errors of libraries have."""

    def __init__(self, code: int, *, where: str) -> None:
        super().__init__(f"code {code} in {where}")
        self.code, self.where = code, where


class Faulty(Classifier):
    """Fails in one stage of the second batch; in replicas, in the one that has a certain sample."""

    fault: Any = None

    def __init__(self, stage: str) -> None:
        super().__init__()
        self.stage = stage
        self.row = torch.tensor(0.0)
        # Gradients of parameters are complete when they are reduced.
        at = not_kept(self.at)
        self.net[2].bias.register_hook(lambda gradient: at("reduce"))

    def at(self, stage: str, x: Tensor | None = None) -> None:
        """Raises here, if this is where and when."""
        if self.fault is None or stage != self.stage or not self.trainer.training:
            return
        if x is None:
            if self.trainer.fit_loop.epoch_loop.batch_idx == 1:
                raise self.fault
        elif bool((x[:, 0].cpu() == self.row).any()) and len(x) < BATCH:
            raise self.fault

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.trainer.training and len(batch[0]) == BATCH and self.row in batch[0][:, 0]:
            self.fault_now("before transfer")
        return batch

    def fault_now(self, stage: str) -> None:
        if self.fault is not None and stage == self.stage:
            raise self.fault

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        self.at("transfer", batch[0])
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.at("after transfer", batch[0])
        return batch

    def forward(self, x: Tensor) -> Tensor:
        self.at("forward", x)
        z = self.net(x)
        if z.requires_grad:
            at = not_kept(self.at)
            z.register_hook(lambda gradient: at("backward", x))
        return z

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.at("step", batch[0])
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.at("logging", batch[0])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.at("on_train_batch_start")

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.at("on_before_zero_grad")

    def on_before_backward(self, loss: Tensor) -> None:
        self.at("on_before_backward")

    def on_after_backward(self) -> None:
        self.at("on_after_backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.at("on_before_optimizer_step")

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, closure)
        self.at("optimizer step")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.at("on_train_batch_end")


class Watching(Callback):
    def __init__(self) -> None:
        self.errors: list[BaseException] = []

    def on_exception(self, job: Any, module: Any, error: BaseException) -> None:
        self.errors.append(error)


@pytest.fixture(autouse=True)
def hangs_end_the_tests() -> Iterator[None]:
    """With the stacks of all threads, instead of waiting for good."""
    faulthandler.dump_traceback_later(60, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def faulty(stage: str, fault: BaseException, seed: str) -> tuple[Faulty, int]:
    """A module that fails in a replica chosen at random, the same in every run of a test."""
    replica = random.Random(seed).randrange(DEVICES)
    module = Faulty(stage)
    row = BATCH + replica * BATCH // DEVICES + 1
    module.row = loader(48).dataset.tensors[0][row, 0]
    module.fault = fault
    return module, replica


def job_of(executor: str, watching: Callback) -> Trainer:
    strategy = DataParallelStrategy(executor=executor)
    options = {"callbacks": [watching], "max_epochs": 2, "num_sanity_val_steps": 0}
    return oracle.trainer(DEVICES, strategy, **options)


def fit(job: Trainer, module: Faulty) -> None:
    job.fit(module, loader(48, BATCH), loader(16, BATCH))


def nothing_is_left(module: Faulty) -> None:
    assert not [t.name for t in threading.enumerate() if t.name.startswith("dp-")]
    assert not {"log", "forward"} & set(module.__dict__)
    assert module.trainer.strategy._mode is None


def it_can_go_on(job: Trainer, module: Faulty) -> None:
    module.fault = None
    module.zero_grad()
    job.should_stop = False
    module.train()
    fit(job, module)
    assert job.current_epoch == 2 and math.isfinite(job.callback_metrics["loss_epoch"])


@pytest.mark.parametrize("executor", ["threads", "inorder"])
@pytest.mark.parametrize("stage", STAGES)
def test_exceptions_arrive_as_they_are(stage: str, executor: str, on: str) -> None:
    error = FaultError(7, where=stage)
    module, replica = faulty(stage, error, f"{stage} {executor}")
    watching = Watching()
    job = job_of(executor, watching)
    with pytest.raises(FaultError) as caught:
        fit(job, module)
    assert caught.value is error and watching.errors == [error] and error.code == 7
    named = stage in ("step", "forward", "logging") or (stage == "backward" and on == "cpu")
    assert said(error).count("in replica") == (1 if named else 0)
    if named:
        assert f"in replica {replica} on" in said(error)
    nothing_is_left(module)
    it_can_go_on(job, module)


@pytest.mark.parametrize("executor", ["threads", "inorder"])
@pytest.mark.parametrize("stage", STAGES)
def test_interrupts_end_the_run(stage: str, executor: str) -> None:
    module, _ = faulty(stage, KeyboardInterrupt(), f"{stage} {executor}")
    job = job_of(executor, Watching())
    with pytest.raises(SystemExit):  # Lightning's way to end a run that was interrupted
        fit(job, module)
    nothing_is_left(module)
    it_can_go_on(job, module)


@pytest.mark.parametrize("executor", ["threads", "inorder"])
def test_ctrl_c_while_replicas_work(executor: str) -> None:
    """The signal comes to the main thread, wherever that is."""

    class Interrupted(Faulty):
        def at(self, stage: str, x: Tensor | None = None) -> None:
            try:
                super().at(stage, x)
            except FaultError:
                self.fault = None
                os.kill(os.getpid(), signal.SIGINT)

    module = Interrupted("forward")
    module.fault = FaultError(1, where="forward")
    module.row = loader(48).dataset.tensors[0][BATCH + 9, 0]
    job = job_of(executor, Watching())
    with pytest.raises(SystemExit):
        fit(job, module)
    nothing_is_left(module)
    it_can_go_on(job, module)


@pytest.mark.parametrize("on", ["cpu"], indirect=True)
def test_an_interrupt_at_any_moment_waits_for_the_tasks_and_for_nothing_else() -> None:
    devices = [torch.device("cpu")] * 3
    executor = Executor(devices, "threads")
    delays = random.Random(0)
    running: set[int] = set()

    def work(k: int, seconds: float) -> None:
        running.add(k)
        time.sleep(seconds)
        if k == 1:
            os.kill(os.getpid(), signal.SIGINT)
        running.discard(k)

    for _ in range(200):
        calls = [partial(work, k, delays.choice([0, 1e-5, 1e-4, 1e-3])) for k in range(3)]
        tasks = [Task(k, device, calls[k]) for k, device in enumerate(devices)]
        with pytest.raises(KeyboardInterrupt):
            executor.run("work", tasks)
            time.sleep(1)  # it may come after the last task has ended
        assert not running
    executor.close()


@pytest.mark.parametrize("executor", ["threads", "inorder"])
@pytest.mark.parametrize("where", ["step", "backward"])
def test_a_loss_that_is_nan_is_the_whole_batchs(where: str, executor: str) -> None:
    """As on one device: the loss and its gradients are NaN, nothing is raised or waits."""

    class Broken(Faulty):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if self.broken and bool((batch[0][:, 0].cpu() == self.row).any()):
                loss = loss * float("nan") if where == "step" else loss + hole(loss)
            self.log("seen", loss, on_step=True, prog_bar=True)
            return loss

    def hole(loss: Tensor) -> Tensor:
        return (loss - loss).sqrt()  # 0, and its derivative is NaN

    seen: list[tuple[float, bool]] = []

    class Look(Callback):
        def on_train_batch_end(self, job: Any, module: Any, outputs: Any, *args: Any) -> None:
            gradients = [p.grad for p in module.parameters()]
            seen.append((float(outputs["loss"]), all(g.isfinite().all() for g in gradients)))

    module = Broken("nowhere")
    module.row = loader(48).dataset.tensors[0][BATCH + 6, 0]
    module.broken = True
    job = job_of(executor, Look())
    fit(job, module)
    assert [finite for _, finite in seen[:3]] == [True, False, False]
    assert math.isnan(seen[1][0]) == (where == "step") and math.isfinite(seen[0][0])

    again = Broken("nowhere")
    again.broken = False
    it_can_go_on(job_of(executor, Look()), again)
