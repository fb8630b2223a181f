"""Calls of replicas: in which threads, with whose thread state, and how they end."""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import oracle
from support.oracle import devices_of, names_of
from support.waiting import Clock, soon
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_dp.parallel.apply import (
    Executor,
    ExecutorName,
    RendezvousError,
    Task,
    collectives,
    worker,
)
from lightning_dp.parallel.comm import streams

pytestmark = pytest.mark.usefixtures("on", "one_thread")
on_cpu = pytest.mark.on("cpu")
executors = pytest.mark.parametrize("how", ["threads", "inorder"])


def tasks_of(*calls: Callable[[], Any]) -> list[Task]:
    devices = devices_of(len(calls))
    notes = [partial(", samples of {}".format, k) for k in range(len(calls))]
    return [Task(k, devices[k], call, notes[k]) for k, call in enumerate(calls)]


@contextmanager
def executor_of(k: int, how: ExecutorName = "threads", **options: Any) -> Iterator[Executor]:
    with closing(Executor(devices_of(k), how, **options)) as executor:
        yield executor


def run(*calls: Callable[[], Any], how: ExecutorName = "threads") -> list[Any]:
    with executor_of(len(calls), how) as executor:
        return executor.run("work", tasks_of(*calls))


def test_each_replica_has_one_thread_until_close() -> None:
    name = lambda: threading.current_thread().name
    with executor_of(3) as executor:
        for _ in range(2):
            names = executor.run("work", tasks_of(name, name, name))
            assert names == ["dp-replica-0", "dp-replica-1", "dp-replica-2"]
            assert executor.run("work", tasks_of(name, name, name)[1:]) == names[1:]
            executor.close()
            assert not [t for t in threading.enumerate() if t.name.startswith("dp-replica")]


@on_cpu
def test_threads_overlap_and_turns_and_deterministic_runs_stay_on_the_calling_thread() -> None:
    barrier = threading.Barrier(3, timeout=60)
    assert sorted(run(barrier.wait, barrier.wait, barrier.wait)) == [0, 1, 2]
    own, main = threading.current_thread, {threading.current_thread()}
    assert set(run(own, own, how="inorder")) == main
    torch.use_deterministic_algorithms(True)
    assert set(run(own, own, how="auto")) == main
    with pytest.raises(ValueError, match=r"executor: expected one of .*got 'processes'"):
        Executor(devices_of(1), "processes")


# The caller's thread state

VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")
SEEN: list[str] = []


@contextmanager
def variable_set() -> Iterator[None]:
    token = VARIABLE.set("set")
    yield
    VARIABLE.reset(token)


def autocast_of(kind: str) -> Any:
    enabled = torch.is_autocast_enabled(kind)
    return enabled and (torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())


class Function(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        SEEN.append("function")
        return func(*args, **(kwargs or {}))


class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        SEEN.append("dispatch")
        return func(*args, **(kwargs or {}))


def saved_tensors() -> Any:
    save = lambda t: SEEN.append("saved") or t
    return torch.autograd.graph.saved_tensors_hooks(save, lambda t: t)


def seen_by_square() -> set[str]:
    SEEN.clear()
    (torch.ones(2, requires_grad=True) ** 2).sum()
    return set(SEEN)


STATES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "grad": (torch.no_grad, torch.is_grad_enabled),
    "inference": (torch.inference_mode, torch.is_inference_mode_enabled),
    "autocast on the CPU": (
        lambda: torch.autocast("cpu", torch.float16, cache_enabled=False),
        lambda: autocast_of("cpu"),
    ),
    "autocast": (
        lambda: torch.autocast(oracle.accelerator(), torch.float16, cache_enabled=False),
        lambda: autocast_of(oracle.accelerator()),
    ),
    "default device": (lambda: torch.device("meta"), lambda: torch.empty(1).device),
    "context variable": (variable_set, VARIABLE.get),
    "saved tensor hooks": (saved_tensors, seen_by_square),
    "function mode": (Function, seen_by_square),
    "dispatch mode": (Dispatch, seen_by_square),
}


@pytest.mark.parametrize("what", STATES)
def test_replicas_have_the_callers_state(what: str) -> None:
    enter, look = STATES[what]
    before, lock = look(), threading.Lock()

    def alone() -> Any:
        with lock:
            return look()

    with enter():
        inside = look()
        assert inside != before and run(alone, alone, alone) == [inside] * 3
    assert run(alone, alone, alone) == [before] * 3


@executors
def test_a_device_left_open_is_the_replicas_own(how: ExecutorName) -> None:
    look = lambda: (torch.empty(1).device, torch.empty(1, device=oracle.accelerator()).device)
    before = look()
    with devices_of(1)[0], executor_of(3, how) as executor:
        expected = [(device, device) for device in devices_of(3)]
        assert executor.run("work", tasks_of(look, look, look)) == expected
        assert executor.run("work", tasks_of(look, look, look)[2:]) == expected[2:]
    assert look() == before


def test_workers_on_the_cpu_share_the_intra_op_threads() -> None:
    """Elsewhere the devices compute, and a worker's share would only slow the host's own ops."""
    torch.set_num_threads(4)
    assert set(run(*[torch.get_num_threads] * 3)) == {1 if oracle.ON == "cpu" else 4}
    assert torch.get_num_threads() == 4


# Errors and interrupts


@on_cpu
@pytest.mark.parametrize(("how", "expected"), [("threads", [0, 1, 2]), ("inorder", [0])])
def test_the_first_replicas_exception_arrives_when_all_have_ended(
    how: ExecutorName, expected: list[int]
) -> None:
    """In order it stops the replicas behind it."""
    ended: list[int] = []

    def fail(k: int, seconds: float) -> None:
        time.sleep(seconds)
        ended.append(k)
        raise ValueError(f"replica {k}")

    calls = [partial(fail, k, seconds) for k, seconds in enumerate([0.02, 0, 0.04])]
    with pytest.raises(ValueError, match="replica 0"):
        run(*calls, how=how)
    assert sorted(ended) == expected


@executors
def test_a_replica_that_waits_too_long_says_who_has_not_come(
    how: ExecutorName, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "GRACE_SECONDS", 0.1)
    release = threading.Event()
    waits = lambda: collectives.barrier("all")
    match = (
        rf"at barrier 'all' within 0.1 seconds, got: replica 0 on {names_of(2)[0]} is at barrier "
        rf"'all', replica 1 on {names_of(2)[1]} is still run"
    )
    with executor_of(2, how, timeout=0.1) as executor:
        start = time.perf_counter()
        with pytest.raises(RendezvousError, match=match):
            executor.run("work", tasks_of(waits, lambda: release.wait(30)))
        assert time.perf_counter() - start < 15, "it has waited for the one that does not come"
        release.set()
        assert executor.run("work", tasks_of(int, int)) == [0, 0]
    assert soon(lambda: not [t for t in threading.enumerate() if t.name.startswith("dp-")])


# executor="auto"


@on_cpu  # whose time is the host's
@pytest.mark.parametrize("overlaps", [True, False])
def test_auto_takes_threads_where_calls_overlap_and_else_order(
    overlaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, in_order = Clock(), list[bool]()
    monkeypatch.setattr(streams, "time", SimpleNamespace(perf_counter=clock))

    def work() -> None:
        in_order.append(threading.current_thread() is threading.main_thread())
        clock.work(0.003 if overlaps or in_order[-1] else 0.018, alone=not overlaps)

    with executor_of(3, "auto") as executor:
        for _ in range(20):
            executor.choose("work", 3)
            executor.run("work", tasks_of(work, work, work))
        assert in_order[:3] == [True] * 3 and in_order[-3:] == [not overlaps] * 3
        assert executor.is_settled("work")
