"""A replica that does not end: Ctrl-C names it and where it is, and leaves its thread behind."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from support import oracle
from support.oracle import Classifier, assert_same, devices_of, loader, names_of
from support.waiting import soon
from torch import Tensor

from lightning_dp import DataParallelStrategy
from lightning_dp.parallel.apply import Calls, Executor, Task, worker

pytestmark = pytest.mark.usefixtures("on", "one_thread")


class Trap:
    """Where one replica gets stuck, once, after it has pressed Ctrl-C."""

    def __init__(self) -> None:
        self.is_set = False
        self.thread: threading.Thread | None = None
        self.release = threading.Event()

    def hold(self, worker: str) -> None:
        """For good, in the worker of this name; the others pass."""
        if not self.is_set or threading.current_thread().name != worker:
            return
        self.is_set, self.thread = False, threading.current_thread()
        os.kill(os.getpid(), signal.SIGINT)
        self.wait()

    def wait(self) -> None:
        self.release.wait()  # stuck


class BusyTrap(Trap):
    """Stuck in Python: such a replica can be ended, once it has been left behind."""

    def wait(self) -> None:
        while not self.release.is_set():  # stuck
            pass


@pytest.fixture(autouse=True)
def hangs_end_the_tests() -> Iterator[None]:
    faulthandler.dump_traceback_later(120, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def trap(monkeypatch: pytest.MonkeyPatch) -> Iterator[Trap]:
    yield from set_trap(Trap(), monkeypatch)


@pytest.fixture
def busy_trap(monkeypatch: pytest.MonkeyPatch) -> Iterator[Trap]:
    yield from set_trap(BusyTrap(), monkeypatch)


def set_trap(trap: Trap, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trap]:
    monkeypatch.setattr(worker, "GRACE_SECONDS", 0.2)
    others = set(threading.enumerate())
    yield trap
    trap.release.set()
    # On a busy machine the replicas beside it have been left behind, too.
    assert soon(lambda: trap.thread is None or not set(threading.enumerate()) - others)


def tasks_of(*calls: Callable[[], Any]) -> list[Task]:
    devices = devices_of(len(calls))
    return [
        Task(k, devices[k], call, partial(", samples of {}".format, k))
        for k, call in enumerate(calls)
    ]


def named(caplog: Any) -> str:
    """What was said of replica 1; on a busy machine others may take long, too."""
    texts = [r.getMessage() for r in caplog.records if r.name == "lightning_dp"]
    (text,) = [text for text in texts if "replica 1 " in text or "replica-1 " in text]
    return text


def test_an_interrupt_names_the_replica_and_its_line_and_leaves_it_behind(
    trap: Trap, caplog: Any
) -> None:
    executor = Executor(devices_of(3), "threads")
    trap.is_set = True
    hold = partial(trap.hold, "dp-replica-1")
    with pytest.raises(KeyboardInterrupt):
        executor.run("work", tasks_of(int, hold, int))
    text = named(caplog)
    assert f"replica 1 on {names_of(3)[1]}, samples of 1" in text
    assert __file__ in text and "in wait\n    self.release.wait()  # stuck" in text
    assert trap.thread is not None and trap.thread.is_alive()
    # A later run has threads of its own.
    threads = executor.run("work", tasks_of(*[threading.current_thread] * 3))
    assert trap.thread not in threads and len(set(threads)) == 3
    executor.close()
    assert not any(thread.is_alive() for thread in threads)


def test_a_replica_that_is_stuck_in_python_is_ended(busy_trap: Trap, caplog: Any) -> None:
    executor = Executor(devices_of(2), "threads")
    busy_trap.is_set = True
    with pytest.raises(KeyboardInterrupt):
        executor.run("work", tasks_of(int, partial(busy_trap.hold, "dp-replica-1")))
    executor.close()
    assert named(caplog)
    assert soon(lambda: not busy_trap.thread.is_alive())
    assert not busy_trap.release.is_set()


def test_a_second_interrupt_is_raised_at_once(
    trap: Trap, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "GRACE_SECONDS", 1e6)
    executor, calls = Executor(devices_of(2), "threads"), Calls()
    trap.is_set = True

    def press_again() -> None:
        if soon(lambda: calls.broken is not None):
            monkeypatch.setattr(worker, "GRACE_SECONDS", 0.2)  # of `close`
            os.kill(os.getpid(), signal.SIGINT)

    finger = threading.Thread(target=press_again)
    finger.start()
    with pytest.raises(KeyboardInterrupt):
        executor.run("work", tasks_of(int, partial(trap.hold, "dp-replica-1")), calls=calls)
    executor.close()
    finger.join()
    assert named(caplog)


# In the modes


class Stuck(Classifier):
    """Replica 1 gets stuck in the second batch."""

    trap: Trap | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.trap is not None:
            self.trap.hold("dp-replica-1")
        return self.net(x)


class Meeting(Stuck):
    """Where replicas meet, they have workers in order too."""

    def loss(self, batch: Any) -> Tensor:
        if self.trap is not None:
            self.trainer.strategy.barrier()
        return super().loss(batch)


def fit(make: Callable[[], Stuck], mode: str, executor: str, trap: Trap | None) -> oracle.Run:
    torch.manual_seed(0)
    module = make()
    strategy = DataParallelStrategy(mode=mode, executor=executor)
    job = oracle.trainer(3, strategy, precision="64-true", num_sanity_val_steps=0)
    module.trap = trap
    job.fit(module, loader(), loader())
    return oracle.Run(module, job)


FITS = [
    pytest.param(Stuck, "step", "threads", id="step"),
    pytest.param(Stuck, "forward", "threads", id="forward"),
    pytest.param(Meeting, "step", "inorder", id="step in order"),
]


@pytest.mark.parametrize(("make", "mode", "executor"), FITS)
@pytest.mark.usefixtures("unchecked")
def test_a_fit_ends_and_another_one_is_right(
    make: Callable[[], Stuck], mode: str, executor: str, trap: Trap, caplog: Any
) -> None:
    caplog.set_level(logging.WARNING, "lightning_dp")
    trap.is_set = True
    with pytest.raises(SystemExit):  # Lightning's way to end a run that was interrupted
        fit(make, mode, executor, trap)
    text = named(caplog)
    assert "replica 1" in text and "self.release.wait()  # stuck" in text
    again = fit(make, mode, executor, trap)
    torch.manual_seed(0)
    one = make()
    job = oracle.trainer(1, precision="64-true", num_sanity_val_steps=0)
    job.fit(one, loader(), loader())
    assert_same(again, oracle.Run(one, job))
