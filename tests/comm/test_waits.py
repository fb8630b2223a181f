"""Waits of the engine that no result of a training shows when they are gone."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from support.device_kinds import on_accelerators
from support.oracle import devices_of
from torch import nn

from lightning_dp.parallel.apply import Executor, Task
from lightning_dp.parallel.check.snapshot import Snapshot

pytestmark = [on_accelerators, pytest.mark.usefixtures("on")]


def threads_of_a_new_thread() -> int:
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return seen[0]


def test_the_number_of_threads_of_threads_to_come_is_the_callers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However late a worker sets its own, which is for a moment that of all."""
    own, caller = torch.set_num_threads, threading.current_thread()

    def set_late(number: int) -> None:
        if threading.current_thread() is not caller:
            time.sleep(0.1)
        own(number)

    torch.set_num_threads(3)
    monkeypatch.setattr(torch, "set_num_threads", set_late)
    devices = [torch.device("cpu")] * 3
    executor = Executor(devices, "threads")
    try:
        executor.run("work", [Task(k, device, lambda: None) for k, device in enumerate(devices)])
        assert threads_of_a_new_thread() == 3
    finally:
        executor.close()


def test_when_workers_rest_they_have_let_go_of_their_calls() -> None:
    """What these hold, a batch say, is gone before a step is done again."""
    devices = devices_of(2)
    executor = Executor(devices, "threads")
    ended: list[int] = []
    try:
        executor.run("work", [Task(k, device, lambda: None) for k, device in enumerate(devices)])
        for worker in executor._workers:
            worker.inbox.put(lambda: ended.append(time.sleep(0.1) or 1))
        executor.rest()
        assert len(ended) == 2
    finally:
        executor.close()


@pytest.mark.sim_only("It counts the copies between devices.")
def test_a_snapshot_writes_only_what_has_changed() -> None:
    """It looks at what is there; what has not come yet would differ from everything."""
    changed, kept = (
        torch.arange(4.0, device=devices_of(1)[0]),
        torch.arange(4.0, device=devices_of(1)[0]),
    )
    snapshot = Snapshot(nn.Module(), [devices_of(1)[0]], [changed, kept])
    changed.add_(1)
    torch.sim.reset_copy_stats()
    snapshot.restore()
    assert changed.tolist() == [0, 1, 2, 3]
    assert torch.sim.copy_stats()["cpu", "sim:0"].count == 1


def test_the_check_of_the_first_step_sees_the_buffers_that_are_there() -> None:
    module = nn.Module()
    module.register_buffer("state", torch.arange(4.0, device=devices_of(1)[0]) + 1)
    snapshot = Snapshot(module, devices_of(1))
    module.state += 1
    assert snapshot.changes()["buffer", "state"].tolist() == [2, 3, 4, 5]
