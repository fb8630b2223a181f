"""Tests that are there already, run in several processes: each runs the same ones, side by side.

A test that compares `oracle.run(..., devices=3)` with `devices=1` has then a Trainer whose three
devices the processes share out, and another one of which the others know nothing.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from pathlib import Path

import pytest

from support import oracle
from support.processes import run_in_processes

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
