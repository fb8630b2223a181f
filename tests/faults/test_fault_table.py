"""Faults and interrupts leave nothing behind: a sample of what `fault_table.py` goes through."""

from __future__ import annotations

import faulthandler
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import fault_table
import pytest
from fault_cases import (
    Fault,
    Left,
    Setting,
    all_settings,
    fault_cases,
    run_fault,
    train,
    victim,
)
from fault_table import count, show
from interrupts import Tracer, interrupts, lines_of, run_interrupt

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]

SCRIPT = Path(__file__).parents[1] / "fault_table.py"
SWAPS = ("forward.py", "contexts.py", "reduce.py", "aside.py", "apply.py", "manual_optimization.py")


@pytest.fixture(autouse=True)
def hangs_end_the_tests() -> Iterator[None]:
    """With the stacks of all threads, instead of waiting for good."""
    faulthandler.dump_traceback_later(240, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.mark.slow
def test_faults_of_all_kinds_leave_nothing_behind() -> None:
    for case in fault_cases(24, seed=1, on=("cpu",)):
        assert not (left := run_fault(case)), (str(case), left)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["by hand", "drop-in", "forward"])
def test_interrupts_where_something_is_replaced_leave_nothing_behind(mode: str) -> None:
    cases = interrupts([Setting(mode, "threads")], seed=1)
    chosen = [case for case in cases if case.line[0].endswith(SWAPS)]
    assert len(chosen) > 50
    for case in chosen[:: len(chosen) // 8]:
        assert not (left := run_interrupt(case)), (str(case), left)


def test_an_interrupt_comes_at_its_line_and_visit() -> None:
    setting = Setting("drop-in", "inorder")
    line = next(line for line, n in lines_of(setting).items() if n > 1)
    tracer = Tracer(line, nth=2)
    with pytest.raises(KeyboardInterrupt) as caught:
        tracer.run(partial(train, victim(setting.mode, Fault()), setting))
    last = caught.traceback[-2]  # the last one is the tracer
    assert (str(last.path), last.lineno + 1) == line and tracer.visits[line] == 2


def test_what_is_wrong_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    case = fault_cases(1, seed=0)[0]
    table: dict[str, Counter[str]] = {}
    count(case, Left(), table)
    assert show(table) == 0
    count(case, "hangs", table)
    count(case, Left(threads="dp-replica-0"), table)
    count(case, Left(broken="another weight", wrong_error="no error"), table)
    count(case, Left(broken="gradients"), table, again=False)
    assert show(table) == 4
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.split()[-6:] == ["5", "1", "1", "1", "1", "1"]
    count(case, Left(broken="gradients"), table, again=False)
    assert show(table) == 5


def test_what_goes_wrong_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    case = fault_cases(1, seed=0)[0]
    for found, expected in (("", False), ("hangs", True)):
        tried: list[int] = []

        def outcomes(cases: Any, processes: int, found: Any = found, tried: Any = tried) -> Any:
            tried.append(len(tried))
            yield cases[0], found if len(tried) == 3 else Left()

        monkeypatch.setattr(fault_table, "outcomes", outcomes)
        assert fault_table.goes_wrong_again(case) is expected and len(tried) == 3


@pytest.mark.slow
def test_the_script_finds_nothing() -> None:
    faulthandler.cancel_dump_traceback_later()  # the script watches each case by itself
    command = [sys.executable, str(SCRIPT), "--count", "50", "--seed", "2", "--apart", "5"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=3600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert len(all_settings()) == 16 and "together" in done.stdout
