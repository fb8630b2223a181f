"""Every test leaves no thread behind, and the environment and torch's globals as found.

Whole folders of tests run in a process for each core. Files and tests that are named, or chosen
with -k, run in this process, where a debugger and prints work; `-n 4` and `-n 0` say otherwise.
"""

import gc
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from conformance_table import table
from hypothesis import HealthCheck, settings
from oracle import SIM_DEVICES

from lightning_dp import sim

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as shells start what runs behind them
    signal.signal(signal.SIGINT, signal.default_int_handler)

MOST_PROCESSES = 8  # each takes about 1 GB
CONFORMS = "::test_as_one_device["

SIM_IS_SLOW = {
    "test_callbacks",
    "test_classes_made_at_run_time",
    "test_containers_on_self",
    "test_copied_trainers",
    "test_dataloader_iter",
    "test_denoise",
    "test_faults",
    "test_first_step",
    "test_forward_calls",
    "test_forward_mode",
    "test_least_samples",
    "test_let_go",
    "test_lightning_demos",
    "test_logs_and_metrics",
    "test_manual_optimisation",
    "test_metrics_as_losses",
    "test_mistakes",
    "test_modules_that_broke_dp",
    "test_peers_models",
    "test_pytorch_lightning",
    "test_state_in_buffers",
    "test_stdlib_lm",
    "test_steps_set_to_none",
    "test_stuck_replicas",
    "test_trainer_options",
    "test_unusual_steps",
    "test_wrapped_optimizers",
}
"""Long files, whose runs on simulated devices are for `-m slow`; others cover these devices."""


# A busy machine is no failure.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--side-streams",
        action="store_true",
        help="each test is on a stream of its own on every simulated device",
    )


@pytest.hookimpl(tryfirst=True)  # before the processes are counted
def pytest_cmdline_main(config: pytest.Config) -> None:
    option = config.option
    is_told = getattr(option, "numprocesses", 0) is not None or hasattr(config, "workerinput")
    in_here = option.usepdb or option.collectonly or option.capture == "no"
    in_here |= bool(option.keyword or getattr(option, "lf", False))  # few tests, as a rule
    if is_told or in_here or not all(Path(name).is_dir() for name in config.args):
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    option.numprocesses = min(cores or 1, MOST_PROCESSES) if (cores or 1) > 1 else 0
    option.dist = "worksteal"
    # Else each process has a thread per core for every operation, and most of them wait.
    threads = (cores or 1) // max(1, option.numprocesses)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))


def pytest_collection_finish() -> None:
    """Imported code is no garbage: collections, of which tests make many, need not look at it."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before slow tests are deselected
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        callspec = getattr(item, "callspec", None)
        on_sim = callspec is not None and callspec.params.get("on") == "sim"
        chosen = any("on" in mark.args[:1] for mark in item.iter_markers("parametrize"))
        if item.path.stem in SIM_IS_SLOW and on_sim and not chosen:
            item.add_marker(pytest.mark.slow)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """With -v, after the tests of conformance: their table."""
    names = {
        outcome: [r.nodeid for r in terminalreporter.getreports(outcome) if CONFORMS in r.nodeid]
        for outcome in ("passed", "failed")
    }
    if terminalreporter.verbosity > 0 and any(names.values()):
        terminalreporter.section("conformance")
        for line in table(names["passed"], names["failed"]):
            terminalreporter.write_line(line)


@pytest.fixture(params=["cpu", "sim"])
def on(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Runs a test on replicas on the CPU, and again on as many simulated devices."""
    kind: str = request.param
    if kind == "sim":
        sim.enable(SIM_DEVICES)
    monkeypatch.setattr(oracle, "ON", kind)
    yield kind


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, int], None]]:
    """Limits a simulated device to what it has in use now, and so many bytes more."""
    sim.enable(SIM_DEVICES)
    monkeypatch.setattr(oracle, "ON", "sim")

    def leave(device: int, extra: int) -> None:
        gc.collect()
        torch.sim.set_memory_limit(device, torch.sim.memory_allocated(device) + extra)

    yield leave
    for device in range(SIM_DEVICES):
        torch.sim.set_memory_limit(device, None)


@pytest.fixture
def on_side_streams() -> Iterator[None]:
    """The test is on a stream of its own on every device: what only default streams order shows."""
    sim.enable(SIM_DEVICES)
    pairs = [(torch.sim.default_stream(k), torch.Stream(f"sim:{k}")) for k in range(SIM_DEVICES)]
    # Of weights that were made on another stream. It is right, and torch says so at no loss.
    warnings.filterwarnings("ignore", "The AccumulateGrad node's stream does not match")
    for default, side in pairs:
        side.wait_stream(default)
        torch.accelerator.set_stream(side)
    torch.accelerator.set_device_index(0)
    yield
    for default, side in pairs:
        default.wait_stream(side)
        torch.accelerator.set_stream(default)
    torch.accelerator.set_device_index(0)


@pytest.fixture(autouse=True)
def all_are_on_side_streams(request: pytest.FixtureRequest) -> None:
    """With --side-streams; but for the simulated devices' own tests, which are about streams."""
    if request.config.getoption("--side-streams") and request.path.parent.name != "sim":
        request.getfixturevalue("on_side_streams")


@pytest.fixture
def one_thread() -> None:
    """One thread per operation: small models gain nothing by more, and a busy machine is slow."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_thread_is_left_behind() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = [t.name for t in threading.enumerate() if t not in before and t.name.startswith("dp-")]
    assert not left, f"threads left behind: {left}"


@pytest.fixture(autouse=True)
def environment_is_restored() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True)
def torch_globals_are_restored() -> Iterator[None]:
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_default_dtype(dtype)
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
