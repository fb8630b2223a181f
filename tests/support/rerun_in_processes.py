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
PASSED = "passed"


class Outcomes:
    """A plugin that keeps what becomes of every test: "passed", or why not."""

    def __init__(self) -> None:
        self.told: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.rpartition("/")[2]
        if report.when == "call" or not report.passed:
            told = PASSED if report.passed else f"{report.outcome} {report.when}: {report.longrepr}"
            if self.told.get(name, PASSED) == PASSED:
                self.told[name] = told


def outcomes(names: Sequence[str], devices: int | None, options: Sequence[str]) -> dict[str, str]:
    """Runs tests in this process."""
    oracle.TOGETHER, oracle.DEVICES = True, devices
    seen, said = Outcomes(), io.StringIO()
    fixed = ["-q", "-s", "-p", "no:cacheprovider", "-n", "0", "-m", "not interop"]
    # One that hangs ends the run.
    fixed += ["-o", "faulthandler_timeout=100", "-o", "faulthandler_exit_on_timeout=true"]
    # Of hooks, about what is every process's own: those of these tests log what is the same in all.
    fixed += ["-W", "ignore:It is recommended to use `self.log"]
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = pytest.main([*(str(TESTS / n) for n in names), *fixed, *options], plugins=[seen])
    if not seen.told:
        raise AssertionError(f"Expected tests, got none (exit code {code}): {said.getvalue()}")
    return seen.told


def run_again(
    names: Sequence[str],
    options: Sequence[str] = (),
    *,
    processes: int = 2,
    devices: int | None = None,
    seconds: float = 600.0,
) -> dict[str, str]:
    """What becomes of tests in several processes: "passed", or which process says what.

    Args:
        names: of files, or of tests in them, as pytest takes them, in the folder of tests.
        options: others for pytest.
        processes: how many run each test together.
        devices: how many they have together; None for what the tests say.
        seconds: after which they hang.
    """
    told = run_in_processes(outcomes, processes, names, devices, options, seconds=seconds)
    everything = list(dict.fromkeys(name for own in told for name in own))
    return {name: _joined([own.get(name, "not run") for own in told]) for name in everything}


def _joined(told: Sequence[str]) -> str:
    others = [f"process {rank}: {text}" for rank, text in enumerate(told) if text != PASSED]
    return "\n".join(others) or PASSED


def assert_passed(told: dict[str, str]) -> None:
    """Asserts that all have passed."""
    failed = [f"{name}\n{text}" for name, text in told.items() if text != PASSED]
    assert not failed, f"{len(failed)} of {len(told)}:\n" + "\n\n".join(failed)
