"""Calls of replicas: in which threads, with whose thread state, and how they end."""

from __future__ import annotations

import _thread
import contextvars
import gc
import subprocess
import sys
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
from support.programs import ROOT
from support.waiting import Clock, soon
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_dp.parallel.apply import (
    Calls,
    Executor,
    ExecutorName,
    RendezvousError,
    Task,
    collectives,
    optimizer_threads,
    worker,
)
from lightning_dp.parallel.apply.thread_state import ALONE, TEAM
from lightning_dp.parallel.comm import streams

pytestmark = pytest.mark.usefixtures("on")
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


@contextmanager
def variable_set() -> Iterator[None]:
    token = VARIABLE.set("set")
    yield
    VARIABLE.reset(token)


def autocast_of(kind: str) -> Any:
    enabled = torch.is_autocast_enabled(kind)
    return enabled and (torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())


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
}


@pytest.mark.parametrize("what", STATES)
def test_workers_have_the_callers_state(what: str) -> None:
    enter, look = STATES[what]
    before = look()
    with enter():
        inside = look()
        assert inside != before and run(look, look, look) == [inside] * 3
    assert run(look, look, look) == [before] * 3


@executors
def test_a_device_left_open_is_the_replicas_own(how: ExecutorName) -> None:
    look = lambda: (torch.empty(1).device, torch.empty(1, device=oracle.accelerator()).device)
    before = look()
    with devices_of(1)[0], executor_of(3, how) as executor:
        expected = [(device, device) for device in devices_of(3)]
        assert executor.run("work", tasks_of(look, look, look)) == expected
        assert executor.run("work", tasks_of(look, look, look)[2:]) == expected[2:]
    assert look() == before


class Function(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        SEEN.append("function")
        return func(*args, **(kwargs or {}))


class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        SEEN.append("dispatch")
        return func(*args, **(kwargs or {}))


SEEN: list[str] = []


@on_cpu
def test_modes_and_saved_tensor_hooks_are_the_callers() -> None:
    SEEN.clear()
    save = lambda t: SEEN.append("saved") or t
    square = lambda: torch.ones(2, requires_grad=True) ** 2
    with torch.autograd.graph.saved_tensors_hooks(save, lambda t: t), Function(), Dispatch():
        run(square, square)
    assert SEEN.count("saved") == 2
    assert min(SEEN.count("function"), SEEN.count("dispatch")) >= 2
    SEEN.clear()
    run(square, square)
    assert not SEEN


def test_workers_on_the_cpu_share_the_intra_op_threads() -> None:
    torch.set_num_threads(4)
    # Elsewhere the devices compute, and a worker's share would only slow the host's own ops.
    assert set(run(*[torch.get_num_threads] * 3)) == {1 if oracle.ON == "cpu" else 4}
    assert torch.get_num_threads() == 4


@on_cpu
@pytest.mark.parametrize(
    ("sizes", "alone"),
    [([], False), ([TEAM] * 9, False), ([TEAM + 1], True), ([1, ALONE], False)],
)
def test_an_optimizer_beside_workers_takes_one_thread(sizes: list[int], alone: bool) -> None:
    """Where its step is long enough to wake a team of threads, and too short to need one."""
    parameters = [SimpleNamespace(numel=lambda n=n: n, grad=1) for n in sizes]
    parameters.append(SimpleNamespace(numel=lambda: TEAM + 1, grad=None))
    optimizer = SimpleNamespace(param_groups=[{"params": parameters}])
    assert optimizer_threads(optimizer) == (1 if alone else torch.get_num_threads())


# Errors and interrupts


class OddError(Exception):
    """An exception that cannot be made from a message alone."""

    def __init__(self, code: int, *, reason: str) -> None:
        super().__init__(code, reason)
        self.reason = reason


@executors
def test_an_exception_arrives_as_it_is_with_a_note(how: ExecutorName) -> None:
    raised = OddError(7, reason="because")

    def fail() -> None:
        raise raised

    note = rf"in replica 1 on {names_of(3)[1]}, samples of 1"
    with pytest.raises(OddError, match=note) as caught:
        run(int, fail, int, how=how)
    assert caught.value is raised and any(entry.name == "fail" for entry in caught.traceback)


@on_cpu
@on_cpu
def test_in_order_an_exception_stops_the_replicas_behind_it() -> None:
    ran: list[int] = []

    def fails() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(partial(ran.append, 0), fails, partial(ran.append, 2), how="inorder")
    assert ran == [0]


def test_of_several_exceptions_the_first_replicas_arrives_when_all_have_ended() -> None:
    ended: list[int] = []

    def fail(k: int, seconds: float) -> None:
        time.sleep(seconds)
        ended.append(k)
        raise ValueError(f"replica {k}")

    with pytest.raises(ValueError, match="replica 0"):
        run(lambda: fail(0, 0.02), lambda: fail(1, 0), lambda: fail(2, 0.04))
    assert sorted(ended) == [0, 1, 2]


@pytest.fixture
def nobody_swallows_interrupts() -> Iterator[None]:
    """One that arrives in a callback of the garbage collector (hypothesis has one) is lost."""
    callbacks, gc.callbacks[:] = list(gc.callbacks), []
    yield
    gc.callbacks[:] = callbacks


@on_cpu
@pytest.mark.usefixtures("nobody_swallows_interrupts")
def test_an_interrupt_at_any_moment_ends_the_run_when_all_tasks_have_ended() -> None:
    """Also while they are handed out, and between a result's arrival and a look at it."""
    running: set[int] = set()

    def task(k: int, delay: float) -> None:
        running.add(k)
        if k == 2:
            time.sleep(delay)
            _thread.interrupt_main()
        running.discard(k)

    with executor_of(3) as executor:
        for n in range(150):
            calls = [partial(task, k, n % 10 * 2e-5) for k in range(3)]
            with pytest.raises(KeyboardInterrupt):
                executor.run("work", tasks_of(*calls))
                time.sleep(5)  # the interrupt has still to arrive
            assert not running


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
    left_behind = lambda: [t for t in threading.enumerate() if t.name.startswith("dp-")]
    assert soon(lambda: not left_behind())


# Which of both ways


@on_cpu  # whose time is the host's
def test_auto_takes_threads_where_they_overlap_and_in_order_where_they_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(streams, "time", SimpleNamespace(perf_counter=clock))
    in_turns: list[bool] = []
    is_main = lambda: threading.current_thread() is threading.main_thread()

    def wait() -> None:
        in_turns.append(is_main())
        clock.work(0.015)

    def exclude() -> None:
        in_turns.append(is_main())
        clock.work(0.003 if is_main() else 0.018, alone=True)

    with executor_of(3, "auto") as executor:
        for work, expected in ((wait, False), (exclude, True)):
            for _ in range(20):
                executor.run(work.__name__, tasks_of(work, work, work))
            assert in_turns[-3:] == [expected] * 3


@on_cpu
def test_no_garbage_is_collected_while_replicas_run_in_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Afterwards it is as before, also after an error."""
    monkeypatch.setattr(sys, "version_info", (3, 11))  # later ones collect at safe places alone

    def fail() -> None:
        assert not gc.isenabled()
        raise OddError(1, reason="on purpose")

    for switch in (gc.disable, gc.enable):
        switch()
        before = gc.isenabled()
        with pytest.raises(OddError):
            run(fail, int)
        assert gc.isenabled() is before


# CUDA, and streams

PRODUCT = """
import warnings
import torch
from lightning_dp import DataParallel

warnings.simplefilter("error")  # cuBLAS warns once in a process
wrapper = DataParallel(torch.nn.Linear(4, 3).to("cuda:0"), ["cuda:0"] * 3, executor="threads")
with torch.no_grad():
    print(wrapper(torch.ones(6, 4)).shape)
"""

DECOMPOSITION = """
import torch
from lightning_dp import DataParallel

class Orthogonal(torch.nn.Linear):
    def forward(self, x):
        return x @ torch.linalg.qr(self.weight)[0]

net = Orthogonal(4, 4).to("cuda:0")
DataParallel(net, ["cuda:0"] * 8, executor="threads")(torch.ones(64, 4)).sum().backward()
print(net.weight.grad.shape)
"""


@pytest.mark.on("cuda")
@pytest.mark.parametrize("script", [PRODUCT, DECOMPOSITION], ids=["product", "decomposition"])
def test_first_calls_of_threads_are_as_in_one(script: str) -> None:
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("torch.Size")


@pytest.mark.on("sim", "multigpu")
def test_a_value_on_a_side_stream_is_waited_for() -> None:
    """Strict simulated devices find a race where the host reads it without an event."""

    def step(k: int) -> float:
        device = devices_of(2)[k]
        with torch.get_device_module(device).stream(torch.Stream(device)):
            x = torch.full((1000,), float(k), device=device)
            return float((collectives.all_gather(x * 2) + 1).sum())

    with executor_of(2) as executor:
        for _ in range(3):
            tasks, calls = tasks_of(lambda: step(0), lambda: step(1)), Calls([1000, 1000])
            assert executor.run("work", tasks, calls=calls) == [4000.0, 4000.0]


# In the Trainer


class Seeing(oracle.Classifier):
    """Notes how many torch threads each part of a step has."""

    def __init__(self) -> None:
        super().__init__()
        layers = [torch.nn.Linear(10, 200), torch.nn.Linear(200, 200), torch.nn.Linear(200, 3)]
        self.net = torch.nn.Sequential(*layers)
        self.seen: list[int] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append(torch.get_num_threads())

    def on_train_batch_end(self, *args: Any) -> None:
        assert torch.get_num_threads() == 3


@on_cpu
@pytest.mark.parametrize(("executor", "threads"), [("threads", 1), ("inorder", 3)])
def test_in_the_trainer_the_optimizer_alone_takes_one_thread(executor: Any, threads: int) -> None:
    torch.set_num_threads(3)
    module = Seeing()
    oracle.run(lambda: module, 2, strategy={"executor": executor}, max_epochs=1)
    assert set(module.seen[1:]) == {threads}
