"""The table of conformance, and the promise on one machine, once more in two processes.

Each case is run by `test_conformance` itself, and so is its comparison with one device: only that
the devices are shared out between two processes. Three devices are two and one. Each layout has a
part of an option's cases, by turns.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.rerun_in_processes import assert_passed, run_again
from test_conformance import OPTIONS
from test_conformance import cases as everything

QUICK = [
    "same_numbers/test_conformance.py::test_as_one_device[language-plain-cpu]",
    "same_numbers/test_conformance.py::test_as_one_device[measured-weights-cpu]",
    "same_numbers/test_conformance.py::test_as_one_device[multitask-accumulation-sim]",
]
NOT_SAME_NUMBERS = {
    "limited": "Embeddings with max_norm are refused by name: ranks would shorten different rows.",
    "output_device": "Another process's device is refused by name.",
    "uses_each_shards": "Batch norm sees other shards: the first batches are cut into unequal ones "
    "within each process, and not over all devices together.",
}
"""Which tests of `test_same_numbers` cannot hold in two processes, by words in their names: why."""

LAYOUTS = {"as told": None, "2x2": 4, "2x1": 2, "2x3": 6}
EVERY, FEW = ("as told", "2x2"), ("plain", "weights")
"""Layouts in which every option is tried, and options that are tried in the others as well."""
FORWARD = {"forward", "manual", "two-optimizers", "adversarial", "contrastive"}
"""Options and families in forward mode, which several processes refuse by name."""
TURNS = 6
"""A layout of an option has one of so many parts of its cases; all would take long."""


def cases() -> Iterator[Any]:
    """In each layout of an option some of its cases, of all kinds of devices, by turns."""
    test = "same_numbers/test_conformance.py::test_as_one_device"
    named = {
        case.values: f"{test}[{'-'.join(case.values)}]"
        for case in everything()
        if FORWARD.isdisjoint(case.values)
    }
    for number, option in enumerate(key for key in OPTIONS if key not in FORWARD):
        own = [name for (_, key, _), name in named.items() if key == option]
        layouts = LAYOUTS if option in FEW else EVERY
        if option == "output-1":  # else another process's device, which is refused by name
            layouts, own = ["2x2"] * 2, [name for name in own if name.endswith("-cpu]")]
        for turn, layout in enumerate(layouts):
            part = (number + turn) % TURNS
            names = [name for i, name in enumerate(own) if i // 2 % TURNS == part]
            yield pytest.param(names, layout, id=f"{option}-{layout}")


def test_some_cases_are_as_one_device() -> None:
    assert_passed(run_again(QUICK))


@pytest.mark.slow
@pytest.mark.parametrize(("names", "layout"), list(cases()))
def test_families_are_as_one_device(names: list[str], layout: str) -> None:
    assert_passed(run_again(names, devices=LAYOUTS[layout]))


@pytest.mark.slow
def test_the_promise_on_one_machine_holds() -> None:
    """On simulated devices, which find races as well; the families above are on all kinds."""
    chosen = " and not ".join(["sim", *NOT_SAME_NUMBERS])
    assert_passed(run_again(["same_numbers/test_same_numbers.py"], ["-k", chosen]))
