"""Workers get the caller's thread state, and return the result or the exception."""

import _thread
import contextvars
import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
from oracle import Classifier, devices_of, loader, names_of, trainer
from patience import Clock
from program_runs import ROOT
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_dp import DataParallelStrategy
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


def tasks_of(*calls: Callable[[], Any]) -> list[Task]:
    devices = devices_of(len(calls))
    return [
        Task(k, devices[k], call, partial(", samples of {}".format, k))
        for k, call in enumerate(calls)
    ]


def run(*calls: Callable[[], Any], how: ExecutorName = "threads") -> list[Any]:
    executor = Executor(devices_of(len(calls)), how)
    try:
        return executor.run("work", tasks_of(*calls))
    finally:
        executor.close()


def seen_by_workers(look: Callable[[], Any]) -> Any:
    seen = run(look, look, look)
    assert seen[0] == seen[1] == seen[2]
    return seen[0]


@pytest.mark.parametrize("how", ["threads", "inorder", "auto"])
def test_results_come_in_the_order_of_the_tasks(how: ExecutorName) -> None:
    assert run(lambda: time.sleep(0.02) or "a", lambda: "b", lambda: "c", how=how) == list("abc")


def test_a_replica_always_runs_in_the_same_thread() -> None:
    executor = Executor(devices_of(3), "threads")
    names = lambda: threading.current_thread().name
    first = executor.run("work", tasks_of(names, names, names))
    again = executor.run("work", tasks_of(names, names, names)[1:])
    executor.close()
    assert first == ["dp-replica-0", "dp-replica-1", "dp-replica-2"] and again == first[1:]


def test_in_order_runs_on_the_calling_thread() -> None:
    assert set(run(threading.current_thread, threading.current_thread, how="inorder")) == {
        threading.current_thread()
    }


def test_tasks_overlap() -> None:
    barrier = threading.Barrier(3, timeout=60)
    assert sorted(run(barrier.wait, barrier.wait, barrier.wait)) == [0, 1, 2]


def test_close_ends_the_threads_and_a_later_run_starts_new_ones() -> None:
    executor = Executor(devices_of(2), "threads")
    for _ in range(2):
        executor.run("work", tasks_of(int, int))
        executor.close()
        assert not [t for t in threading.enumerate() if t.name.startswith("dp-replica")]


def test_grad_and_inference_mode_are_the_callers() -> None:
    modes = lambda: (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
    assert seen_by_workers(modes) == (True, False)
    with torch.no_grad():
        assert seen_by_workers(modes) == (False, False)
    with torch.inference_mode():
        assert seen_by_workers(modes) == (False, True)


def test_autocast_keeps_its_dtype_and_cache_flag() -> None:
    def look(kind: str) -> tuple[bool, torch.dtype, bool]:
        enabled = torch.is_autocast_enabled(kind)
        return enabled, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()

    # Part of a step on an accelerator may run on the CPU.
    for kind in {"cpu", oracle.accelerator()}:
        assert seen_by_workers(partial(look, kind))[0] is False
        with torch.autocast(kind, dtype=torch.float16, cache_enabled=False):
            assert seen_by_workers(partial(look, kind)) == (True, torch.float16, False)


def test_default_device_is_the_callers() -> None:
    make = lambda: torch.empty(1).device
    with torch.device("meta"):
        assert seen_by_workers(make) == torch.device("meta")
    assert seen_by_workers(make) == torch.device("cpu")


@pytest.mark.parametrize("how", ["threads", "inorder"])
def test_a_device_left_open_is_the_replicas_own(how: ExecutorName) -> None:
    def look() -> tuple[torch.device, torch.device]:
        return torch.empty(1).device, torch.empty(1, device=oracle.accelerator()).device

    before = look()
    with devices_of(1)[0]:
        assert run(look, look, look, how=how) == [(device, device) for device in devices_of(3)]
    assert look() == before


def test_a_replica_that_works_alone_has_its_own_device_too() -> None:
    executor = Executor(devices_of(3), "threads")
    look = lambda: torch.empty(1, device=oracle.accelerator()).device
    assert executor.run("work", tasks_of(look, look, look)[2:]) == devices_of(3)[2:]
    executor.close()


def test_workers_leave_the_callers_default_device_as_it_was() -> None:
    """Also where a second one begins before the first has ended, and ends after it."""
    barrier = threading.Barrier(2, timeout=60)

    def wait_longer() -> None:
        barrier.wait()
        time.sleep(0.01)

    before = torch.utils._device.CURRENT_DEVICE
    with devices_of(1)[0]:
        for _ in range(5):
            run(barrier.wait, wait_longer)
    assert before == torch.utils._device.CURRENT_DEVICE


def test_context_variables_are_the_callers() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")
    token = variable.set("set")
    assert seen_by_workers(variable.get) == "set"
    variable.reset(token)


def test_saved_tensor_hooks_are_the_callers() -> None:
    packed: list[int] = []

    def forward() -> bool:
        return bool(
            (torch.ones(2, requires_grad=True, device=oracle.accelerator()) ** 2).requires_grad
        )

    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda t: packed.append(1) or t,
        lambda t: t,
    )
    with hooks:
        run(forward, forward)
    assert len(packed) == 2


def test_torch_function_and_dispatch_modes_are_the_callers() -> None:
    calls: list[str] = []

    class Function(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            calls.append("function")
            return func(*args, **(kwargs or {}))

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            calls.append("dispatch")
            return func(*args, **(kwargs or {}))

    ones = lambda: torch.ones(2, device=oracle.accelerator())
    with Function(), Dispatch():
        run(ones, ones)
    assert calls.count("function") >= 2 and calls.count("dispatch") >= 2
    calls.clear()
    run(ones, ones)
    assert not calls


def test_workers_on_the_cpu_share_the_intra_op_threads() -> None:
    torch.set_num_threads(4)
    # Elsewhere the devices compute, and a worker's share would only slow the host's own ops.
    assert seen_by_workers(torch.get_num_threads) == (1 if oracle.ON == "cpu" else 4)
    assert torch.get_num_threads() == 4


class OddError(Exception):
    """An exception that cannot be made from a message alone."""

    def __init__(self, code: int, *, reason: str) -> None:
        super().__init__(code, reason)
        self.reason = reason


@pytest.mark.parametrize("how", ["threads", "inorder"])
def test_an_exception_arrives_as_it_is_with_a_note(how: ExecutorName) -> None:
    raised = OddError(7, reason="because")

    def fail() -> None:
        raise raised

    note = rf"in replica 1 on {names_of(3)[1]}, samples of 1"
    with pytest.raises(OddError, match=note) as caught:
        run(int, fail, int, how=how)
    assert caught.value is raised and caught.value.reason == "because"
    assert any(entry.name == "fail" for entry in caught.traceback)


def test_of_several_exceptions_the_first_replicas_arrives_when_all_have_ended() -> None:
    ended: list[int] = []

    def fail(k: int, seconds: float) -> None:
        time.sleep(seconds)
        ended.append(k)
        raise ValueError(f"replica {k}")

    with pytest.raises(ValueError, match="replica 0"):
        run(lambda: fail(0, 0.05), lambda: fail(1, 0), lambda: fail(2, 0.1))
    assert sorted(ended) == [0, 1, 2]


@pytest.fixture
def nobody_swallows_interrupts() -> Iterator[None]:
    """One that arrives in a callback of the garbage collector (hypothesis has one) is lost."""
    callbacks, gc.callbacks[:] = list(gc.callbacks), []
    yield
    gc.callbacks[:] = callbacks


@pytest.mark.usefixtures("nobody_swallows_interrupts")
def test_an_interrupt_at_any_moment_ends_the_run_when_all_tasks_have_ended() -> None:
    """Also while they are handed out, and between a result's arrival and a look at it."""
    executor = Executor(devices_of(3), "threads")
    running: set[int] = set()
    hung = threading.Event()

    def task(k: int, delay: float) -> None:
        running.add(k)
        if k == 2:
            time.sleep(delay)
            _thread.interrupt_main()
        running.discard(k)

    def second_interrupt() -> None:
        hung.set()
        _thread.interrupt_main()

    for n in range(300):
        watchdog = threading.Timer(20, second_interrupt)
        watchdog.start()
        delay = n % 10 * 2e-5
        with pytest.raises(KeyboardInterrupt):
            executor.run("work", tasks_of(*(partial(task, k, delay) for k in range(3))))
            while not hung.is_set():  # the interrupt has still to arrive
                time.sleep(1e-4)
        assert not running
        watchdog.cancel()
        watchdog.join()
        assert not hung.is_set()
    executor.close()


@pytest.mark.parametrize("on", ["cpu"], indirect=True)  # whose time is the host's
def test_auto_takes_threads_where_they_overlap_and_in_order_where_they_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(streams, "time", SimpleNamespace(perf_counter=clock))
    executor = Executor(devices_of(3), "auto")
    where: list[bool] = []

    def wait() -> None:
        where.append(threading.current_thread() is threading.main_thread())
        clock.work(0.015)

    def exclude() -> None:
        where.append(threading.current_thread() is threading.main_thread())
        in_thread = threading.current_thread() is not threading.main_thread()
        clock.work(0.018 if in_thread else 0.003, alone=True)

    def chosen(work: Callable[[], None]) -> bool:
        for _ in range(20):
            where.clear()
            executor.run(work.__name__, tasks_of(work, work, work))
        return where[0]

    assert chosen(wait) is False
    assert chosen(exclude) is True
    executor.close()


def test_deterministic_algorithms_run_in_order() -> None:
    torch.use_deterministic_algorithms(True)
    assert set(run(threading.current_thread, threading.current_thread, how="auto")) == {
        threading.current_thread()
    }


def test_unknown_executors_are_refused() -> None:
    with pytest.raises(ValueError, match=r"executor: expected one of .*got 'processes'"):
        Executor(devices_of(1), "processes")


# CUDA, and what else belongs to the whole process

PRODUCT = """
import warnings
import torch
from lightning_dp import DataParallel

warnings.simplefilter("error")  # cuBLAS warns once in a process
net = torch.nn.Linear(4, 3).to("cuda:0")
wrapper = DataParallel(net, ["cuda:0"] * 3, executor="threads")
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
wrapper = DataParallel(net, ["cuda:0"] * 8, executor="threads")
wrapper(torch.ones(64, 4)).sum().backward()
print(net.weight.grad.shape)
"""


@pytest.mark.on("cuda")
@pytest.mark.parametrize("script", [PRODUCT, DECOMPOSITION], ids=["product", "decomposition"])
def test_first_calls_of_threads_are_as_in_one(script: str) -> None:
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("torch.Size")


@pytest.mark.on("cpu")
def test_no_garbage_is_collected_while_replicas_run_in_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where two executors overlap; afterwards it is as before, also after an error."""
    monkeypatch.setattr(sys, "version_info", (3, 11))  # later ones collect at safe places alone
    inner, outer = Executor(devices_of(2), "threads"), Executor(devices_of(2), "threads")
    is_in, release = threading.Event(), threading.Event()

    def other() -> None:
        outer.run("work", tasks_of(lambda: is_in.set() or release.wait(60), int))

    def fail() -> None:
        assert not gc.isenabled()
        raise OddError(1, reason="on purpose")

    for enabled in (True, False):
        if not enabled:
            gc.disable()
        try:
            thread = threading.Thread(target=other)
            thread.start()
            assert is_in.wait(60)
            with pytest.raises(OddError):
                inner.run("work", tasks_of(fail, int))
            assert not gc.isenabled(), "the other executor still runs"
            release.set()
            thread.join()
            assert gc.isenabled() is enabled
        finally:
            gc.enable()
            is_in.clear()
            release.clear()
    inner.close()
    outer.close()


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


class Seeing(Classifier):
    """Notes how many torch threads each part of a step has."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(10, 200), torch.nn.Linear(200, 200), torch.nn.Linear(200, 3)
        )
        self.seen: dict[str, list[int]] = {"backward": [], "step": [], "end": []}

    def on_before_backward(self, loss: torch.Tensor) -> None:
        self.seen["backward"].append(torch.get_num_threads())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen["step"].append(torch.get_num_threads())

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen["end"].append(torch.get_num_threads())


@pytest.mark.on("cpu")
@pytest.mark.parametrize(("executor", "threads"), [("threads", 1), ("inorder", 3)])
def test_in_the_trainer_it_does_and_nothing_else(executor: Any, threads: int) -> None:
    torch.set_num_threads(3)
    module = Seeing()
    strategy = DataParallelStrategy(executor=executor)
    trainer(2, strategy, max_epochs=1).fit(module, loader(), loader())
    assert set(module.seen["backward"] + module.seen["end"]) == {3}
    assert set(module.seen["step"][1:]) == {threads}


# Replicas that do not come


@pytest.mark.parametrize("how", ["threads", "inorder"])
def test_a_replica_that_waits_too_long_says_who_has_not_come(
    how: ExecutorName, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "GRACE_SECONDS", 0.2)
    executor = Executor(devices_of(2), how, timeout=0.2)
    release = threading.Event()
    waits = lambda: collectives.barrier("all")
    match = rf"at barrier 'all' within 0.2 seconds, .*replica 1 on {names_of(2)[1]} is still run"
    with pytest.raises(RendezvousError, match=match):
        executor.run("work", tasks_of(waits, lambda: release.wait(2)))
    release.set()
    assert executor.run("work", tasks_of(int, int)) == [0, 0]
    executor.close()


@pytest.mark.on("sim", "multigpu")
def test_a_value_on_a_side_stream_is_waited_for(on: str) -> None:
    """Strict simulated devices find a race where the host reads it without an event."""

    def step(k: int) -> float:
        device = devices_of(2)[k]
        with torch.get_device_module(device).stream(torch.Stream(device)):
            x = torch.full((1000,), float(k), device=device)
            gathered = collectives.all_gather(x * 2)
            return float((gathered + 1).sum())

    executor = Executor(devices_of(2), "threads")
    for _ in range(3):
        calls = Calls([1000, 1000])
        seen = executor.run("work", tasks_of(lambda: step(0), lambda: step(1)), calls=calls)
        assert seen == [4000.0, 4000.0]
    executor.close()
