"""An error or Ctrl-C in any stage arrives as on one device, and leaves nothing behind.

No thread stays, the calling thread has its state, and the next training of the same module gives
the numbers of one device.
"""

from __future__ import annotations

import pytest
from support.fault_cases import ERRORS, EXECUTORS, IN_MODES, FaultCase, Setting, run_fault

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]

PLACES = [(mode, stage) for mode, stages in IN_MODES.items() for stage in stages]


def cases(on: str) -> list[FaultCase]:
    """Every stage of every mode; errors, executors and replicas take turns."""
    names = list(ERRORS)
    return [
        FaultCase(
            Setting(mode, EXECUTORS[i % 2], on), stage, names[i % len(names)], i % 3, i % 4 < 2
        )
        for i, (mode, stage) in enumerate(PLACES)
    ]


def interrupts(on: str) -> list[FaultCase]:
    """Ctrl-C in every stage of step mode, forward mode and the drop-in."""
    return [
        FaultCase(Setting(mode, EXECUTORS[i % 2], on), stage, "KeyboardInterrupt", i % 3, i % 4 < 2)
        for i, (mode, stage) in enumerate(PLACES)
    ]


@pytest.mark.parametrize("case", cases("cpu")[::3] + interrupts("cpu")[1::3], ids=str)
def test_an_error_leaves_nothing_behind(case: FaultCase) -> None:
    left = run_fault(case)
    assert not left, left


@pytest.mark.slow
@pytest.mark.parametrize("case", cases("sim") + interrupts("sim") + cases("cpu"), ids=str)
def test_an_error_in_any_stage_leaves_nothing_behind(case: FaultCase) -> None:
    left = run_fault(case)
    assert not left, left
