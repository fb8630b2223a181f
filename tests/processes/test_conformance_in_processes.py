"""The table of conformance, and the promise on one machine, once more in two processes.

Each case is run by `test_conformance` itself, and so is its comparison with one device: only that
the devices are shared out between two processes. Three devices are two and one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from again_in_processes import assert_passed, run_again
from families import FAMILIES
from test_conformance import OPTIONS

QUICK = [
    "test_conformance.py::test_as_one_device[language-plain-cpu]",
    "test_conformance.py::test_as_one_device[measured-weights-cpu]",
    "test_conformance.py::test_as_one_device[frozen-accumulation-sim]",
]
NOT_SAME_NUMBERS = {
    "output_device": "Another process's device is refused by name.",
    "uses_each_shards": "Batch norm sees other shards: the first batches are cut into unequal ones "
    "within each process, and not over all devices together.",
}
"""Which tests of `test_same_numbers` cannot hold in two processes, by words in their names: why."""

FEW = ("plain", "weights", "manual", "forward")
"""Options that are tried in every layout."""
ALL = {"cpu": ("as told", "2x2"), "sim": ("2x2",)}
"""Layouts in which every option is tried."""
LAYOUTS = {"as told": None, "2x1": 2, "2x2": 4, "2x3": 6}

_OWN_DEVICE = "The second output device would be another process's, which is refused by name."
WITHOUT = {("output-1", layout, on): _OWN_DEVICE for layout in LAYOUTS for on in ("cpu", "sim")}
"""What cannot be in two processes, by option, layout and kind of devices, and why."""
del WITHOUT["output-1", "2x2", "cpu"], WITHOUT["output-1", "2x3", "cpu"]  # an index of a replica


def cases() -> Iterator[Any]:
    for on in ("cpu", "sim"):
        for layout in LAYOUTS:
            for option in OPTIONS:
                if layout in ALL[on] or option in FEW:
                    why = WITHOUT.get((option, layout, on))
                    marks = [] if why is None else [pytest.mark.skip(reason=why)]
                    yield pytest.param(option, layout, on, marks=marks)


def test_some_cases_are_as_one_device() -> None:
    assert_passed(run_again(QUICK))


@pytest.mark.slow
@pytest.mark.parametrize(("option", "layout", "on"), list(cases()))
def test_every_family_is_as_one_device(option: str, layout: str, on: str) -> None:
    families = [f for f in FAMILIES if OPTIONS[option].manual or f != "adversarial"]
    names = [f"test_conformance.py::test_as_one_device[{f}-{option}-{on}]" for f in families]
    assert_passed(run_again(names, devices=LAYOUTS[layout]))


@pytest.mark.slow
@pytest.mark.parametrize("on", ["cpu", "sim"])
def test_the_promise_on_one_machine_holds(on: str) -> None:
    chosen = " and not ".join([on, *NOT_SAME_NUMBERS])
    assert_passed(run_again(["test_same_numbers.py"], ["-k", chosen]))
