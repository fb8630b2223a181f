"""How many lines the project may have: each step of the second edition lowers these numbers."""

from __future__ import annotations

import pytest
from support.programs import ROOT

PYTHON, CPP = (".py",), (".cpp", ".h")
BUDGETS: dict[str, tuple[tuple[str, ...], tuple[str, ...], int]] = {
    "the package": (("lightning_dp",), PYTHON, 14_120),
    "the engine": (("lightning_dp/parallel",), PYTHON, 7_950),
    "programs": (("lightning_dp/app", "lightning_dp/doctor"), PYTHON, 810),
    "C++ in the package": (("lightning_dp",), CPP, 0),
    "tests": (("tests",), PYTHON, 23_000),
    "C++ in tests": (("tests",), CPP, 2_800),
    "guides": (("examples/guides",), (".md",), 900),
}


@pytest.mark.parametrize("part", BUDGETS)
def test_each_part_keeps_to_its_lines(part: str) -> None:
    folders, suffixes, most = BUDGETS[part]
    files = [f for folder in folders for f in (ROOT / folder).rglob("*") if f.suffix in suffixes]
    lines = sum(len(file.read_text().splitlines()) for file in files)
    assert lines <= most, f"{part}: expected at most {most:,} lines, got {lines:,}. Write less."


def test_configuration_has_few_files() -> None:
    assert len(list((ROOT / "conf").rglob("*.yaml"))) <= 37
