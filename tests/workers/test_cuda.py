"""What CUDA does at first use, and how worker threads come by it; each case in a new process."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from lightning_dp.parallel.contexts import Paired
from lightning_dp.parallel.workers import Executor, cuda
from lightning_dp.parallel.workers.thread_state import ThreadState

TESTS = Path(__file__).parents[1]

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
@pytest.mark.usefixtures("on")
@pytest.mark.parametrize("script", [PRODUCT, DECOMPOSITION], ids=["product", "decomposition"])
def test_first_calls_of_threads_are_as_in_one(script: str) -> None:
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=TESTS.parent)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("torch.Size")


def test_on_other_devices_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.linalg, "solve_triangular", None)
    cuda.enter_context(torch.device("cpu"))
    cuda.load_linear_algebra([torch.device("cpu")] * 2)
    cuda.load_linear_algebra([torch.device("cuda", 0)])  # no second thread


def test_a_device_that_has_failed_ends_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error is that of the call that the thread is for."""
    asked: list[torch.device] = []

    def fails(device: torch.device) -> None:
        asked.append(device)
        raise torch.AcceleratorError("device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "current_stream", fails)
    cuda.enter_context(torch.device("cuda", 0))
    assert asked == [torch.device("cuda", 0)]


def test_on_each_gpu_only_the_first_turn_begins_an_invocation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else what CUDA graphs have returned for the replicas before would be written over."""
    kept: list[int] = []

    def one_invocation(device: int) -> Paired:
        return Paired(partial(kept.append, device), partial(kept.remove, device))

    monkeypatch.setattr(cuda, "one_invocation", one_invocation)
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    turns = cuda.InTurns(ThreadState(first, grad=True))
    seen: list[list[int]] = []
    with turns:
        for device in (first, second, torch.device("cpu"), torch.device("cpu"), second, first):
            turns.next(device)
            seen.append(list(kept))
    assert seen == [[], [], [], [], [1], [1, 0]] and not kept


def test_workers_have_the_graphs_of_the_callers_thread() -> None:
    device, made = torch.device("cpu"), list[str]()
    state = ThreadState(device, True, have_graphs=lambda: made.append("graphs"), is_plain=False)
    state.call(device, made.append, "call")
    assert made == ["graphs", "call"]


@pytest.mark.parametrize(
    ("names", "looks"), [("cuda:0 cuda:0", True), ("cuda:0 cuda:1", False), ("cpu cpu", False)]
)
def test_without_gradients_the_first_call_on_a_shared_gpu_is_in_order(
    names: str, looks: bool
) -> None:
    """It may be that of compiled code that nobody knew of, and that makes CUDA graphs."""
    executor = Executor(list(map(torch.device, names.split())))
    with torch.no_grad():
        first, second = (executor.choose("validation_step", 2) for _ in range(2))
    assert (first, second) == (not looks, True)
