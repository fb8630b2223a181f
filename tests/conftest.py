"""Every test leaves no thread behind, and the environment and torch's globals as found.

Tests run in a process for each core; with `-n 0` in this one, where a debugger and prints work. Of
a test with three parameters or more as many combinations run as it takes for every two values to
meet; `--whole-products` runs all.
"""

import functools
import gc
import logging
import os
import signal
import sys
import tempfile
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import pytest
import sim_devices
import torch
from hypothesis import HealthCheck, settings
from lightning.fabric.utilities.rank_zero import rank_zero_only
from support import device_kinds, oracle
from support.conformance_table import table
from support.device_kinds import SIM_DEVICES
from support.pairwise import covering

from lightning_dp.first_step import FirstSteps
from lightning_dp.parallel.check import FirstCalls

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as shells start what runs behind them
    signal.signal(signal.SIGINT, signal.default_int_handler)

ELSEWHERE = "elsewhere"  # in place of a kind: this process has none that the test is for
# Processes that compile the same read each other's files before they are whole.
WORKER = os.environ.get("PYTEST_XDIST_WORKER")
if WORKER is not None:
    cache = os.path.join(tempfile.gettempdir(), f"lightning_dp_inductor_{WORKER}")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    # Else each process has a thread per core for every operation, and most of them wait.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

CONFORMS = "::test_as_one_device["

ABOUT_DEVICES = {
    *("apply", "batches", "comm", "drop_in", "forward", "reduce", "replicas", "same_numbers", "sim")
}
"""Folders whose tests run on simulated devices, too; elsewhere a case of each test, if slow."""
SIM_IS_SLOW = {
    "test_callbacks",
    "test_changes_between_steps",
    "test_classes_made_at_run_time",
    "test_own_stages",
    "test_forward_calls",
    "test_forward_mode",
    "test_let_go",
    "test_lightning_demos",
    "test_modules_that_broke_dp",
    "test_peers_models",
    "test_pytorch_lightning",
    "test_silent_writes",
    "test_steps_set_to_none",
    "test_strides_of_gradients",
    "test_sync_batch_norm",
    "test_trainer_options",
    "test_unusual_steps",
}
"""Long files in these folders, whose runs on simulated devices are for `-m slow`."""


# A busy machine is no failure.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--on",
        choices=["sim", "cuda"],
        help="the accelerators that are tested beside the CPU: simulated ones (default) or GPUs",
    )
    parser.addoption(
        "--whole-products",
        action="store_true",
        help="all combinations of a test's parameters, not only those in which every two meet",
    )
    parser.addoption(
        "--side-streams",
        action="store_true",
        help="each test is on a stream of its own on every accelerator",
    )


def pytest_configure(config: pytest.Config) -> None:
    device_kinds.choose(config.option.on, config.option.markexpr)
    if "cuda" in device_kinds.kinds:
        # Convolutions would have 10 bits of a float32.
        torch.backends.cudnn.allow_tf32 = False


def pytest_report_header() -> str:
    return device_kinds.header()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`on` is each kind of this process that the test is for."""
    if "on" not in metafunc.fixturenames or _chooses_itself(metafunc.definition):
        return
    mark = metafunc.definition.get_closest_marker("on")
    wanted = mark.args if mark else device_kinds.ALL
    if metafunc.definition.get_closest_marker("sim_only"):
        wanted = ("sim",)
    found = device_kinds.as_parameters(wanted)
    metafunc.parametrize("on", found or [ELSEWHERE], indirect=True)


def _chooses_itself(item: pytest.Item) -> bool:
    return any("on" in names for names in _parametrized(item))


def _parametrized(item: pytest.Item) -> Iterator[list[str]]:
    """The parameters of a test that are listed together."""
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0]
        yield [n.strip() for n in names.split(",")] if isinstance(names, str) else list(names)


@pytest.hookimpl(tryfirst=True)  # before slow tests are deselected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = set(_elsewhere(items))
    if not config.option.whole_products:
        left_out |= set(_in_no_new_pair([item for item in items if item not in left_out]))
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def _elsewhere(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Those for kinds of devices that this process has not; marks some of the others as slow."""
    seen = set[str]()
    for item in items:
        callspec = getattr(item, "callspec", None)
        kind = callspec.params.get("on") if callspec is not None else None
        mark = item.get_closest_marker("on")
        chosen = (mark and "cpu" not in mark.args) or item.get_closest_marker("sim_only")
        if kind == "sim" and not (chosen or _chooses_itself(item)):
            test, folder = item.nodeid.partition("[")[0], item.path.parent.name
            if folder not in ABOUT_DEVICES and test in seen:
                yield item
                continue
            seen.add(test)
            if folder not in ABOUT_DEVICES or item.path.stem in SIM_IS_SLOW:
                item.add_marker(pytest.mark.slow)
        of_sim = item.get_closest_marker("sim_only") or item.path.parent.name == "sim"
        if kind == ELSEWHERE or (of_sim and "sim" not in device_kinds.kinds):
            yield item


def _in_no_new_pair(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Of each test the combinations without which every two values of its parameters meet."""
    tests = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec"):
            tests[item.nodeid.partition("[")[0]].append(item)
    for own in tests.values():
        rows = [_lists_of(item) for item in own]
        if len(rows[0]) > 2:
            quick = [item.get_closest_marker("slow") is None for item in own]
            kept = set(covering(rows, quick))
            yield from (item for i, item in enumerate(own) if i not in kept)


def _lists_of(item: Any) -> list[Hashable]:
    """Which entry a test has of each list of parameters."""
    left = {name: id(value) for name, value in item.callspec.params.items()}
    listed = [tuple(left.pop(name) for name in names) for names in _parametrized(item)]
    return [*listed, *left.values()]


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


@pytest.fixture(autouse=True, scope="module")
def imported_code_is_no_garbage() -> None:
    """Collections, of which tests make many, need not look at it: half a second each, otherwise."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def on(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test on replicas on the CPU, and again on every other kind of devices there is."""
    kind: str = request.param
    if kind == "sim":
        sim_devices.enable(SIM_DEVICES)
    if kind == "multigpu":
        device_kinds.devices(kind, 2)  # else skipped before it has done anything
    monkeypatch.setattr(oracle, "ON", kind)
    return kind


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, int], None]]:
    """Limits a simulated device to what it has in use now, and so many bytes more."""
    sim_devices.enable(SIM_DEVICES)
    monkeypatch.setattr(oracle, "ON", "sim")

    def leave(device: int, extra: int) -> None:
        gc.collect()
        torch.sim.set_memory_limit(device, torch.sim.memory_allocated(device) + extra)

    yield leave
    for device in range(SIM_DEVICES):
        torch.sim.set_memory_limit(device, None)


@functools.cache
def side_stream(device: torch.device) -> torch.Stream:
    """One for all tests of the process."""
    return torch.Stream(device)


@pytest.fixture
def on_side_streams() -> Iterator[None]:
    """The test is on a stream of its own on every device: what only default streams order shows."""
    if "sim" in device_kinds.kinds:
        sim_devices.enable(SIM_DEVICES)
    devices = device_kinds.devices(device_kinds.kinds[-1], device_kinds.accelerator_count())
    pairs = [(torch.accelerator.current_stream(device), side_stream(device)) for device in devices]
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
    """With --side-streams; but for tests of what is not ours on them.

    Those of the simulated devices are about streams, and the benchmarks' peers know none.
    """
    is_ours = request.path.parent.name != "sim" and request.path.stem != "test_benchmarks"
    if request.config.getoption("--side-streams") and is_ours:
        request.getfixturevalue("on_side_streams")


@pytest.fixture
def one_thread() -> None:
    """One thread per operation: small models gain nothing by more, and a busy machine is slow."""
    torch.set_num_threads(1)


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """No first-step check: for tests that count calls of steps, or of what steps call."""
    begin = FirstSteps.__init__

    def nothing_due(self: FirstSteps, *args: Any) -> None:
        begin(self, *args)
        self.due.clear()

    monkeypatch.setattr(FirstSteps, "__init__", nothing_due)
    monkeypatch.setattr(FirstCalls, "before", lambda *args: None)


@pytest.fixture
def weight_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests with `weight_norm`, whose kernel for GPUs gives doubles the digits of a float."""
    monkeypatch.setitem(oracle.GPU_ROUNDING, torch.float64, 1e-6)


@pytest.fixture(autouse=True)
def no_thread_is_left_behind() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = [t.name for t in threading.enumerate() if t not in before and t.name.startswith("dp-")]
    assert not left, f"threads left behind: {left}"


@pytest.fixture(autouse=True)
def environment_is_restored() -> Iterator[None]:
    before, rank = dict(os.environ), rank_zero_only.rank
    yield
    os.environ.clear()
    os.environ.update(before)
    # Without it loggers of later tests write nothing: the process would be the second of several.
    rank_zero_only.rank = rank


@pytest.fixture(autouse=True)
def loggers_are_restored() -> Iterator[None]:
    """A library that a test imports, or a program that it runs, logs to where its output went."""
    before = {logger: [*logger.handlers] for logger in _loggers()}
    yield
    for logger in _loggers():
        for handler in [*logger.handlers]:
            if handler not in before.get(logger, ()):
                logger.removeHandler(handler)


def _loggers() -> list[logging.Logger]:
    known = logging.root.manager.loggerDict.values()
    return [logging.root, *(logger for logger in known if isinstance(logger, logging.Logger))]


@pytest.fixture(autouse=True)
def hydra_is_restored() -> Iterator[None]:
    """Hydra keeps the configuration of a program that has ended."""
    yield
    if "hydra.core.singleton" in sys.modules:
        from hydra.core.hydra_config import HydraConfig

        HydraConfig.instance().cfg = None


@pytest.fixture(autouse=True)
def torch_globals_are_restored() -> Iterator[None]:
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_default_dtype(dtype)
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
