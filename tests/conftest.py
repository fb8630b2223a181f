"""Which tests run on which kinds of devices, and that each leaves the process as it found it.

`python -m pytest` tests on the CPU and on simulated devices, `--on cuda` on GPUs (see
`support/device_kinds.py`). A test with three parameters or more runs as many combinations as it
takes for every two values to meet. `-n 0` runs all in this process, for debuggers and prints.
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
from support.device_kinds import SIM_DEVICES
from support.pairwise import covering

from lightning_dp.first_step import FirstCalls
from lightning_dp.first_step.lightning_step import FirstSteps

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as shells start what runs behind them
    signal.signal(signal.SIGINT, signal.default_int_handler)

WORKER = os.environ.get("PYTEST_XDIST_WORKER")
if WORKER is not None:
    # Processes that compile the same read each other's files before they are whole.
    cache = os.path.join(tempfile.gettempdir(), f"lightning_dp_inductor_{WORKER}")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    # Else each process has a thread per core for every operation, and most of them wait.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

NONE_HERE = "none here"  # in place of a kind of device: this process has none the test is for
QUICK_ON_SIM = {
    *("apply", "batches", "comm", "reduce", "replicas", "sim"),
    *("test_drop_in", "test_forward_engine", "test_same_numbers", "test_strategy"),
}
"""Folders and files whose tests run on simulated devices by default."""
SLOW_ON_SIM = {"drop_in", "forward", "same_numbers"}
"""Folders whose other tests do with `-m slow`; elsewhere that runs one case of each test."""

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


def pytest_configure(config: pytest.Config) -> None:
    device_kinds.choose(config.option.on, config.option.markexpr)
    if "cuda" in device_kinds.kinds:
        # Convolutions would have 10 bits of a float32.
        torch.backends.cudnn.allow_tf32 = False


def pytest_report_header() -> str:
    return device_kinds.header()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`on` is each kind of this process that the test is for."""
    if "on" not in metafunc.fixturenames or _lists_kinds(metafunc.definition):
        return
    mark = metafunc.definition.get_closest_marker("on")
    wanted = mark.args if mark else device_kinds.ALL
    found = device_kinds.as_parameters(wanted)
    metafunc.parametrize("on", found or [NONE_HERE], indirect=True)


def _lists_kinds(item: pytest.Item) -> bool:
    return any("on" in names for names in _parametrized(item))


def _parametrized(item: pytest.Item) -> Iterator[list[str]]:
    """The parameters of a test that are listed together."""
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0]
        yield [n.strip() for n in names.split(",")] if isinstance(names, str) else list(names)


@pytest.hookimpl(tryfirst=True)  # before slow tests are deselected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept = set(_pairwise([item for item in _fewer_on_sim(items) if not _is_for_others(item)]))
    left_out = [item for item in items if item not in kept]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item in kept]
    changing = [item.nodeid for item in items if " at 0x" in item.nodeid]
    assert not changing, f"Names that differ from process to process: {changing[:3]}"


def _kind_of(item: pytest.Item) -> Any:
    return getattr(item, "callspec", None) and item.callspec.params.get("on")  # type: ignore[attr-defined]  # of functions


def _is_for_others(item: pytest.Item) -> bool:
    """Whether it is for kinds of devices that this process has not."""
    mark, is_of_sim = item.get_closest_marker("on"), item.path.parent.name == "sim"
    wanted = ("sim",) if is_of_sim else mark.args if mark else device_kinds.ALL
    return _kind_of(item) == NONE_HERE or not set(wanted) & set(device_kinds.kinds)


def _fewer_on_sim(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Leaves out, or marks as slow, runs on simulated devices of what is not about devices."""
    seen = set[str]()
    for item in items:
        mark, test = item.get_closest_marker("on"), item.nodeid.partition("[")[0]
        chosen = mark and "cpu" not in mark.args
        places = {item.path.parent.name, item.path.stem}
        if _kind_of(item) == "sim" and not (chosen or places & QUICK_ON_SIM or _lists_kinds(item)):
            if not places & SLOW_ON_SIM and test in seen:
                continue
            seen.add(test)
            item.add_marker(pytest.mark.slow)
        yield item


def _pairwise(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Of each test the combinations in which every two values of its parameters meet."""
    tests = defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    for own in tests.values():
        rows = [_values_of(item) for item in own]
        if len(rows[0]) > 2:
            quick = [item.get_closest_marker("slow") is None for item in own]
            yield from (own[i] for i in covering(rows, quick))
        else:
            yield from own


def _values_of(item: Any) -> list[Hashable]:
    """Which entry a test has of each list of parameters."""
    if not hasattr(item, "callspec"):
        return []
    left = {name: id(value) for name, value in item.callspec.params.items()}
    listed = [tuple(left.pop(name) for name in names) for names in _parametrized(item)]
    return [*listed, *left.values()]


# Devices


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


# What tests ask for


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


# What every test leaves as it was


@pytest.fixture(autouse=True, scope="module")
def imported_code_is_no_garbage() -> None:
    """Collections, of which tests make many, need not look at it: half a second each, otherwise."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_thread_is_left_behind() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = [t for t in threading.enumerate() if t not in before and t.name.startswith("dp-")]
    for thread in left:
        thread.join(5.0)  # a closed engine's threads may take a moment to end
    assert not any(t.is_alive() for t in left), f"threads left behind: {left}"


@pytest.fixture(autouse=True)
def process_is_as_before() -> Iterator[None]:
    """The environment, torch's globals, loggers and Hydra's configuration are restored."""
    environment, rank = dict(os.environ), rank_zero_only.rank
    handlers = {logger: [*logger.handlers] for logger in _loggers()}
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    yield
    os.environ.clear()
    os.environ.update(environment)
    # Without it loggers of later tests write nothing: the process would be the second of several.
    rank_zero_only.rank = rank
    for logger in _loggers():  # programs log to where their output went
        for handler in [*logger.handlers]:
            if handler not in handlers.get(logger, ()):
                logger.removeHandler(handler)
    if "hydra.core.singleton" in sys.modules:
        from hydra.core.hydra_config import HydraConfig

        HydraConfig.instance().cfg = None
    torch.set_default_dtype(dtype)
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


def _loggers() -> list[logging.Logger]:
    known = logging.root.manager.loggerDict.values()
    return [logging.root, *(logger for logger in known if isinstance(logger, logging.Logger))]
