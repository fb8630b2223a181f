"""An error or Ctrl-C in any stage of a step arrives as on one device, and leaves nothing behind.

No thread stays, the calling thread has its state, and the next training of the same module gives
the numbers of one device.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from support import oracle
from support.forward_twins import said
from support.oracle import Classifier, assert_equal_trees, devices_of, loader, names_of
from support.waiting import not_kept, soon, thread_state, threads_left
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import Metric

from lightning_dp import DataParallelStrategy
from lightning_dp.parallel.apply import Calls, Executor, Task, collectives, worker
from lightning_dp.parallel.engine import Engine
from lightning_dp.parallel.reduce import Reducer
from lightning_dp.parallel.replicate import Replicas
from lightning_dp.parallel.step import TrainingStep

pytestmark = [
    pytest.mark.usefixtures("on", "one_thread"),
    pytest.mark.filterwarnings("ignore"),
]

K, BATCH = 3, 12  # 4 samples each
SAMPLES = 2 * BATCH

IN_REPLICAS = ("step", "network", "log", "collective", "evaluation")
ON_SHARDS = ("transfer_batch_to_device", "on_after_batch_transfer", "backward hook")
HOOKS = (
    *("on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward"),
    *("on_before_optimizer_step", "on_train_batch_end", "on_validation_end"),
)
ELSEWHERE = ("metric of all", "reduce", "optimizer step")
INSIDE: dict[str, tuple[type, str]] = {
    "scatter": (Engine, "scatter"),
    "replicate": (Replicas, "refresh"),
    "apply": (Engine, "apply"),
    "gather": (TrainingStep, "gather"),
    "before backward": (Reducer, "begin"),
    "after backward": (Reducer, "commit"),
}
"""Stages of the engine itself, which fail when their work is done."""
STAGES = [("step", stage) for stage in (*IN_REPLICAS, *ON_SHARDS, *HOOKS, *ELSEWHERE, *INSIDE)]
STAGES += [("forward", s) for s in ("network", "collective", *ON_SHARDS, "reduce", "apply")]


ERRORS: list[Callable[[], BaseException]] = [
    partial(UnicodeDecodeError, "utf-8", b"", 0, 1, "not made from a message alone"),
    partial(KeyError, "a key"),
    partial(torch.OutOfMemoryError, "the user's own"),
    partial(AttributeError, "an attribute"),
]


class Counting(Metric):
    """Counts samples; fails with the whole batch."""

    def __init__(self, at: Callable[..., None]) -> None:
        super().__init__()
        self.at = at
        self.add_state("count", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, x: Tensor) -> None:
        self.at("metric of all", x)
        self.count += len(x)

    def compute(self) -> Tensor:
        return self.count


class Faulty(Classifier):
    """Fails in one stage of the second batch; in replicas, in the one that has a certain sample."""

    fault: BaseException | None = None

    def __init__(self, stage: str, row: Tensor) -> None:
        super().__init__()
        self.stage, self.row, self.batch = stage, row, 0
        self.counting = Counting(not_kept(self.at))
        at = not_kept(self.at)
        # Gradients of parameters are complete when they are reduced.
        self.net[2].bias.register_hook(lambda gradient: at("reduce"))

    def at(self, stage: str, x: Tensor | None = None) -> None:
        """Raises here, if this is where and when."""
        if self.fault is None or stage != self.stage:
            return
        if bool((x[:, 0].cpu() == self.row).any()) if x is not None else self.batch == 1:
            raise self.fault

    def forward(self, x: Tensor) -> Tensor:
        if self.stage == "collective":
            collectives.barrier("before")
        self.at("collective", x)
        self.at("network", x)
        z = self.net(x)
        if z.requires_grad:
            at = not_kept(self.at)  # a graph that reaches what holds it is never freed
            z.register_hook(lambda gradient: at("backward hook", x))
        return z

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.at("step", batch[0])
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.at("log", batch[0])
        self.counting.update(batch[0])
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.at("evaluation", batch[0])
        self.log("val", F.cross_entropy(self(batch[0]), batch[1]))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.batch = batch_idx
        self.at("on_train_batch_start")

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        self.at("transfer_batch_to_device", batch[0])
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.at("on_after_batch_transfer", batch[0])
        return batch

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, closure)
        self.at("optimizer step")


for _hook in HOOKS:
    if _hook not in vars(Faulty):
        setattr(Faulty, _hook, lambda self, *_, _hook=_hook: self.at(_hook))


@pytest.fixture(autouse=True)
def hangs_end_the_tests() -> Iterator[None]:
    """With the stacks of all threads, instead of waiting for good."""
    faulthandler.dump_traceback_later(60, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def faulty(stage: str, replica: int = 0) -> Faulty:
    torch.manual_seed(0)
    data = loader(BATCH if stage == "evaluation" else SAMPLES).dataset.tensors[0]
    return Faulty(stage, data[-BATCH + replica * BATCH // K + 1, 0])


def fit(module: nn.Module, devices: int = K, *callbacks: Callback, **options: Any) -> None:
    strategy: Any = "auto"
    if devices > 1:
        strategy = DataParallelStrategy(**options, check_first_step=False)
    job = oracle.trainer(
        devices,
        strategy,
        max_epochs=1,
        num_sanity_val_steps=0,
        precision="64-true",
        callbacks=list(callbacks),
    )
    job.fit(module, loader(SAMPLES, BATCH), loader(BATCH, BATCH))


@cache
def undisturbed(on: str) -> dict[str, Tensor]:
    module = faulty("nowhere")
    fit(module, 1)
    return module.cpu().state_dict()


def nothing_is_left(module: Faulty, before: dict[str, Any], on: str, **options: Any) -> None:
    """Of a training that has ended; the next one is one device's."""
    assert not threads_left() and thread_state(on) == before
    for each in module.modules():
        assert not {"log", "forward", "update", "compute", "reset"} & set(vars(each)) - (
            {"update", "compute"} if isinstance(each, Metric) else set()
        )
    assert module.trainer.strategy._mode is None
    module.fault = None
    module.load_state_dict(faulty("nowhere").double().state_dict())
    module.counting.reset()
    module.zero_grad()
    fit(module, **options)
    for key, value in module.cpu().state_dict().items():
        torch.testing.assert_close(value, undisturbed(on)[key], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("interrupted", [False, True], ids=["error", "Ctrl-C"])
@pytest.mark.parametrize(("mode", "stage"), STAGES)
def test_an_error_in_any_stage_leaves_nothing_behind(
    mode: str, stage: str, interrupted: bool, on: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    i = STAGES.index((mode, stage))
    executor, replica = ("threads", "inorder")[i % 2], i % K
    options = {"mode": mode, "executor": executor}
    fault = KeyboardInterrupt() if interrupted else ERRORS[i % len(ERRORS)]()
    module = faulty(stage, replica)
    if stage in INSIDE:
        owner, name = INSIDE[stage]
        original = getattr(owner, name)

        def failing(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            module.at(stage)
            return result

        monkeypatch.setattr(owner, name, failing)
    before, handler = thread_state(on), signal.getsignal(signal.SIGINT)
    module.fault = fault
    # Lightning's way to end a run that was interrupted is an exit.
    with pytest.raises(SystemExit if interrupted else type(fault)) as caught:
        fit(module, **options)
    signal.signal(signal.SIGINT, handler)  # Lightning ignores it while it ends a run
    if not interrupted:
        assert caught.value is fault
        # Elsewhere one backward on the calling thread serves all replicas.
        in_worker = stage == "backward hook" and mode == "step" and on == "cpu"
        named = stage in IN_REPLICAS or in_worker
        assert said(fault).count("in replica") == (1 if named else 0)
        assert not named or f"in replica {replica} on" in said(fault)
    fault.__traceback__ = None
    del caught, fault
    monkeypatch.undo()
    nothing_is_left(module, before, on, **options)


@pytest.mark.parametrize("on", ["cpu"], indirect=True)
def test_an_interrupt_at_any_moment_waits_for_the_tasks_and_for_nothing_else() -> None:
    executor = Executor(devices_of(3), "threads")
    delays = random.Random(0)
    running: set[int] = set()

    def work(k: int, seconds: float) -> None:
        running.add(k)
        time.sleep(seconds)
        if k == 1:
            os.kill(os.getpid(), signal.SIGINT)
        running.discard(k)

    for _ in range(100):
        calls = [partial(work, k, delays.choice([0, 1e-5, 1e-4, 1e-3])) for k in range(3)]
        with pytest.raises(KeyboardInterrupt):
            executor.run("work", tasks_of(*calls))
            time.sleep(1)  # it may come after the last task has ended
        assert not running
    executor.close()


# Replicas that do not end


class Trap:
    """Where replica 1 gets stuck, once, after it has pressed Ctrl-C."""

    def __init__(self) -> None:
        self.is_set = True
        self.thread: threading.Thread | None = None
        self.release = threading.Event()

    def hold(self, *, in_python: bool = False) -> None:
        """For good; one that is stuck in Python can be ended, once it has been left behind."""
        if self.is_set and threading.current_thread().name == "dp-replica-1":
            self.is_set, self.thread = False, threading.current_thread()
            os.kill(os.getpid(), signal.SIGINT)
            while in_python and not self.release.is_set():
                pass
            self.release.wait()  # stuck


@pytest.fixture
def trap(monkeypatch: pytest.MonkeyPatch) -> Iterator[Trap]:
    monkeypatch.setattr(worker, "GRACE_SECONDS", 0.2)
    others, trap = set(threading.enumerate()), Trap()
    yield trap
    trap.release.set()
    # On a busy machine the replicas beside it have been left behind, too.
    assert soon(lambda: trap.thread is None or not set(threading.enumerate()) - others)


def tasks_of(*calls: Callable[[], Any]) -> list[Task]:
    devices = devices_of(len(calls))
    return [Task(k, devices[k], call, lambda: ", forward") for k, call in enumerate(calls)]


def named(caplog: Any) -> str:
    """What was said of replica 1; on a busy machine others may take long, too."""
    texts = [r.getMessage() for r in caplog.records if r.name == "lightning_dp"]
    (text,) = [text for text in texts if "replica 1 " in text or "replica-1 " in text]
    return text


def test_a_replica_that_is_stuck_in_python_is_named_and_ended(trap: Trap, caplog: Any) -> None:
    executor = Executor(devices_of(2), "threads")
    with pytest.raises(KeyboardInterrupt):
        executor.run("work", tasks_of(int, partial(trap.hold, in_python=True)))
    executor.close()
    assert f"replica 1 on {names_of(2)[1]}, forward" in named(caplog)
    assert soon(lambda: not trap.thread.is_alive()) and not trap.release.is_set()


def test_a_second_interrupt_is_raised_at_once(
    trap: Trap, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "GRACE_SECONDS", 1e6)
    executor, calls = Executor(devices_of(2), "threads"), Calls()

    def press_again() -> None:
        if soon(lambda: calls.broken is not None):
            monkeypatch.setattr(worker, "GRACE_SECONDS", 0.2)  # of `close`
            os.kill(os.getpid(), signal.SIGINT)

    finger = threading.Thread(target=press_again)
    finger.start()
    with pytest.raises(KeyboardInterrupt):
        executor.run("work", tasks_of(int, trap.hold), calls)
    executor.close()
    finger.join()
    assert named(caplog)


class Stuck(Classifier):
    """Replica 1 gets stuck; where replicas meet, they have workers in order too."""

    trap: Trap | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.trainer.strategy.barrier()
        if self.trap is not None:
            self.trap.hold()
        return self.net(x)


@pytest.mark.parametrize(("mode", "executor"), [("forward", "threads"), ("step", "inorder")])
def test_a_fit_with_a_stuck_replica_ends_and_another_one_is_right(
    mode: str, executor: str, trap: Trap, caplog: Any
) -> None:
    caplog.set_level(logging.WARNING, "lightning_dp")

    def trained(devices: int = K) -> dict[str, Any]:
        torch.manual_seed(0)
        module = Stuck()
        module.trap = trap
        fit(module, devices, mode=mode, executor=executor)
        return module.state_dict()

    with pytest.raises(SystemExit):  # Lightning's way to end a run that was interrupted
        trained()
    assert "self.release.wait()  # stuck" in named(caplog)
    assert_equal_trees(trained(), trained(1), "state", atol=1e-10, rtol=0.0)
