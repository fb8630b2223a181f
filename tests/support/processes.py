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
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from support import oracle

SECONDS = 120.0  # a job that takes longer hangs


class ProcessesError(AssertionError):
    """Some processes have failed; says which, with their tracebacks."""


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
    context = server()
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
    pipes, processes = [], []
    for rank in range(count):
        machine, local = divmod(rank, count // machines)
        own = {"RANK": str(rank), "LOCAL_RANK": str(local), "GROUP_RANK": str(machine)}
        here, there = context.Pipe(duplex=False)
        target = (there, variables | own, job, args)
        process = context.Process(target=_work, args=target, daemon=False)
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    try:
        answers = _answers(pipes, seconds)
    finally:
        for process in processes:
            process.join(timeout=5 if process.is_alive() else None)
            if process.is_alive():
                process.kill()
                process.join()
    failed = [f"process {r}:\n{text}" for r, (ok, text) in enumerate(answers) if not ok]
    if failed:
        raise ProcessesError("\n".join(failed))
    return [value for _, value in answers]


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


def _answers(pipes: list[Connection], seconds: float) -> list[tuple[bool, Any]]:
    answers: list[tuple[bool, Any]] = [(False, "no answer in time")] * len(pipes)
    open_pipes, end = dict(zip(pipes, range(len(pipes)), strict=True)), time.monotonic() + seconds
    while open_pipes and (left := end - time.monotonic()) > 0:
        for pipe in wait(list(open_pipes), timeout=left):
            rank = open_pipes.pop(pipe)  # type: ignore[call-overload]  # only pipes were waited for
            try:
                answers[rank] = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]  # as above
            except EOFError:
                answers[rank] = False, "ended without an answer"
    return answers


def _work(answer: Connection, environ: Mapping[str, str], job: Any, args: Any) -> None:
    os.environ.update(environ)
    torch.set_num_threads(1)
    gc.freeze()  # what the server has imported: collections need not look at it
    try:
        answer.send_bytes(pickle.dumps((True, job(*args))))
    except BaseException:
        with contextlib.suppress(OSError):
            answer.send_bytes(pickle.dumps((False, traceback.format_exc())))
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


def outcomes(names: Sequence[str], devices: int | None, options: Sequence[str]) -> dict[str, str]:
    """Runs tests in this process."""
    oracle.TOGETHER, oracle.DEVICES = True, devices
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


def assert_pass_in_two_processes(
    names: Sequence[str], options: Sequence[str] = (), devices: int | None = None
) -> None:
    """Runs tests in two processes, of which each must pass all.

    Args:
        names: of files, or of tests in them, as pytest takes them, in the folder of tests.
        options: others for pytest.
        devices: how many they have together; None for what the tests say.
    """
    found = run_in_processes(outcomes, 2, names, devices, options, seconds=600.0)
    failed = [
        f"{name}, process {rank}: {text}"
        for rank, own in enumerate(found)
        for name, text in own.items()
        if text != "passed"
    ]
    assert not failed and found[0].keys() == found[1].keys(), "\n\n".join(failed)
