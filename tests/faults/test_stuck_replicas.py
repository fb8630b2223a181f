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
    faulthandler.dump_traceback_later(120, exit=True)  # a hang ends the tests
    others, trap = set(threading.enumerate()), Trap()
    yield trap
    trap.release.set()
    # On a busy machine the replicas beside it have been left behind, too.
    assert soon(lambda: trap.thread is None or not set(threading.enumerate()) - others)
    faulthandler.cancel_dump_traceback_later()


def tasks_of(*calls: Callable[[], Any]) -> list[Task]:
    devices = devices_of(len(calls))
    return [Task(k, devices[k], call, lambda: ", forward") for k, call in enumerate(calls)]


def named(caplog: Any) -> str:
    """What was said of replica 1; on a busy machine others may take long, too."""
    texts = [r.getMessage() for r in caplog.records if r.name == "lightning_dp"]
    (text,) = [text for text in texts if "replica 1 " in text or "replica-1 " in text]
    return text


def test_an_interrupt_names_the_replica_and_its_line_and_leaves_it_behind(
    trap: Trap, caplog: Any
) -> None:
    executor = Executor(devices_of(3), "threads")
    with pytest.raises(KeyboardInterrupt):
        executor.run("work", tasks_of(int, trap.hold, int))
    text = named(caplog)
    assert f"replica 1 on {names_of(3)[1]}, forward" in text
    assert __file__ in text and "in hold\n    self.release.wait()  # stuck" in text
    assert trap.thread is not None and trap.thread.is_alive()
    # A later run has threads of its own.
    threads = executor.run("work", tasks_of(*[threading.current_thread] * 3))
    assert trap.thread not in threads and len(set(threads)) == 3
    executor.close()
    assert not any(thread.is_alive() for thread in threads)


def test_a_replica_that_is_stuck_in_python_is_ended(trap: Trap, caplog: Any) -> None:
    executor = Executor(devices_of(2), "threads")
    with pytest.raises(KeyboardInterrupt):
        executor.run("work", tasks_of(int, partial(trap.hold, in_python=True)))
    executor.close()
    assert named(caplog)
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


def fit(devices: int, strategy: Any, trap: Trap | None = None) -> oracle.Run:
    torch.manual_seed(0)
    module, job = Stuck(), oracle.trainer(devices, strategy, precision="64-true", max_epochs=1)
    module.trap = trap
    job.fit(module, loader(), loader())
    return oracle.Run(module, job)


@pytest.mark.parametrize(("mode", "executor"), [("forward", "threads"), ("step", "inorder")])
@pytest.mark.usefixtures("unchecked")
def test_a_fit_ends_and_another_one_is_right(
    mode: str, executor: str, trap: Trap, caplog: Any
) -> None:
    caplog.set_level(logging.WARNING, "lightning_dp")
    options = {"mode": mode, "executor": executor}
    with pytest.raises(SystemExit):  # Lightning's way to end a run that was interrupted
        fit(3, DataParallelStrategy(**options), trap)
    assert "self.release.wait()  # stuck" in named(caplog)
    assert_same(fit(3, DataParallelStrategy(**options), trap), fit(1, "auto"))
