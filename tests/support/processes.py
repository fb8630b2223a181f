"""Runs a job in another process, or in several that train together, as torchrun would start them.

The processes are forked from a server that has imported everything, so they start at once.
"""

from __future__ import annotations

import contextlib
import gc
import io
import multiprocessing as mp
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from support import oracle

SECONDS = 120.0  # a job that takes longer hangs


def run_in_processes(
    job: Callable[..., Any],
    count: int,
    *args: Any,
    environ: Mapping[str, str] | None = None,
    seconds: float = SECONDS,
    machines: int = 1,
) -> list[Any]:
    """What `job(*args)` returns in each of so many processes, in the order of their ranks.

    The job and its arguments are pickled: functions and classes have to be a module's own.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count // machines),
        "TORCHELASTIC_RUN_ID": "test",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        **(environ or {}),
    }
    pools, futures = [ProcessPoolExecutor(1, server()) for _ in range(count)], []
    try:
        for rank, pool in enumerate(pools):
            machine, local = divmod(rank, count // machines)
            own = {"RANK": str(rank), "LOCAL_RANK": str(local), "GROUP_RANK": str(machine)}
            futures.append(pool.submit(_work, variables | own, job, args))
        done, _ = wait(futures, seconds, FIRST_EXCEPTION)
        errors = {rank: f.exception() for rank, f in enumerate(futures) if f in done}
        said = [f"process {rank}: {e!r}\n{e.__cause__}" for rank, e in errors.items() if e]
        assert len(done) == count and not said, "\n".join(said) or f"ended in time: {[*errors]}"
        return [pickle.loads(future.result()) for future in futures]
    finally:
        for pool in pools:
            for process in (pool._processes or {}).values():
                process.kill()
            pool.shutdown()


def server() -> Any:
    """The context of processes that have imported everything as they begin, where there are any."""
    if "forkserver" not in mp.get_all_start_methods():
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["lightning_dp", "support.oracle", "torchmetrics"])
    return context


def in_another_process(job: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What `job(*args, **options)` returns in a process that nothing else has run in."""
    with ProcessPoolExecutor(1, server()) as process:
        return process.submit(job, *args, **options).result(timeout=300)


def _work(environ: Mapping[str, str], job: Callable[..., Any], args: Any) -> bytes:
    os.environ.update(environ)
    torch.set_num_threads(1)
    gc.freeze()  # what the server has imported: collections need not look at it
    try:
        return pickle.dumps(job(*args))  # a pool's own way shares the memory of tensors
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


# --- tests that are there already, in several processes -------------------------------------------
# One that compares `oracle.run(..., devices=3)` with `devices=1` has then a Trainer whose three
# devices the processes share out, and another one of which the others know nothing.

TESTS = Path(__file__).parents[1]


class Outcomes:
    """A plugin that keeps what becomes of every test: "passed", or why not."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self.found[report.nodeid] = f"{report.outcome} {report.when}: {report.longrepr}"
        elif report.when == "call":
            self.found.setdefault(report.nodeid, "passed")


def outcomes(names: Sequence[str], options: Sequence[str]) -> dict[str, str]:
    """Runs tests in this process."""
    oracle.TOGETHER = True
    seen, printed = Outcomes(), io.StringIO()
    fixed = ["-q", "-s", "-p", "no:cacheprovider", "-n", "0", "-m", "not interop"]
    # One that hangs ends the run.
    fixed += ["-o", "faulthandler_timeout=100", "-o", "faulthandler_exit_on_timeout=true"]
    # Of hooks, about what is every process's own: those of these tests log what is the same in all.
    fixed += ["-W", "ignore:It is recommended to use `self.log"]
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        code = pytest.main([*(str(TESTS / n) for n in names), *fixed, *options], plugins=[seen])
    assert seen.found, f"Expected tests, got none (exit code {code}): {printed.getvalue()}"
    return seen.found


def assert_pass_in_two_processes(names: Sequence[str], options: Sequence[str] = ()) -> None:
    """Runs tests in two processes, of which each must pass all.

    Args:
        names: of files, or of tests in them, as pytest takes them, in the folder of tests.
        options: others for pytest.
    """
    found = run_in_processes(outcomes, 2, names, options, seconds=600.0)
    failed = [
        f"{name}, process {rank}: {text}"
        for rank, own in enumerate(found)
        for name, text in own.items()
        if text != "passed"
    ]
    assert not failed and found[0].keys() == found[1].keys(), "\n\n".join(failed)
