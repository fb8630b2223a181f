"""The tests of this folder are collected where `-m` names them; they end with a table."""

import re
from pathlib import Path
from typing import Any

import pytest

COLUMNS = ["library", "model", "mode", "devices", "steps", "parameters", "logs", "predictions"]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Without being asked for, the libraries are not even imported."""
    return None if re.search(r"(?<!not )\binterop\b", config.option.markexpr) else True


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = terminalreporter.getreports("passed")
    rows = [value for r in reports for name, value in r.user_properties if name == "interop"]
    if not rows:
        return
    terminalreporter.section("largest difference from one device")
    shown = [COLUMNS, *([f"{x:.1e}" if isinstance(x, float) else str(x) for x in r] for r in rows)]
    widths = [max(len(row[i]) for row in shown) for i in range(len(COLUMNS))]
    for row in shown:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        terminalreporter.write_line("  ".join(cells).rstrip())
