"""The house: which wing may import which, and that a wing offers what its `__init__` names."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from support.programs import ROOT

PACKAGE = ROOT / "lightning_dp"

FLOORS = [
    ["__main__"],
    ["app"],
    ["doctor"],
    ["__init__"],
    ["pytorch_lightning"],
    ["strategy"],
    ["auto_split", "data_parallel"],
    ["first_step"],
    ["modes"],
    ["layer_sync", "recording"],
    ["module_state", "checkpointing", "monitor"],
    ["processes", "table"],
    ["lightning_private"],
    ["parallel.step", "parallel.forward", "parallel.functional"],
    ["parallel.engine"],
    ["parallel.reduce", "parallel.usage", "parallel.out_of_memory"],
    ["parallel.replicate", "parallel.apply"],
    ["parallel.processes"],
    ["parallel.gather"],
    ["parallel.scatter"],
    ["parallel.comm"],
    ["parallel.split", "parallel.devices", "parallel.errors"],
    ["parallel.torch_private", "parallel.checks"],
    ["parallel.contexts"],
]
"""Top to bottom; what is on one floor does not import each other."""

LEVELS = {room: level for level, floor in enumerate(reversed(FLOORS)) for room in floor}


def dotted(file: Path) -> str:
    """A file's name as one imports it, without the package's."""
    return ".".join(p for p in file.relative_to(PACKAGE).with_suffix("").parts if p != "__init__")


def room_of(name: str) -> str:
    """The room that a module, or a name of it, is in."""
    rooms = [room for room in LEVELS if f"{name}.".startswith(f"{room}.")]
    return max(rooms, key=len, default="__init__")


def imports(file: Path) -> Iterator[str]:
    """All that a file imports from the package, without the package's name."""
    for node in ast.walk(ast.parse(file.read_text())):
        names = [alias.name for alias in getattr(node, "names", ()) if isinstance(alias, ast.alias)]
        of = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        own = [f"{of}{name}" for name in names if f"{of}{name}.".startswith("lightning_dp.")]
        yield from (name.partition(".")[2] for name in own)


def test_a_room_imports_only_rooms_below_it() -> None:
    files = [(file, room_of(dotted(file))) for file in PACKAGE.rglob("*.py")]
    arrows = {(here, room_of(name)) for file, here in files for name in imports(file)}
    up = [f"{a} imports {b}" for a, b in arrows if a != b and LEVELS[b] >= LEVELS[a]]
    assert len(arrows) > 50 and not up, sorted(up)


def test_only_the_app_imports_hydra() -> None:
    pattern = re.compile(r"^\s*(?:import|from)\s+(?:hydra|omegaconf)\b", re.MULTILINE)
    files = [file for file in PACKAGE.rglob("*.py") if pattern.search(file.read_text())]
    assert {file.relative_to(PACKAGE).parts[0] for file in files} == {"app"}


def test_every_file_is_in_a_room_and_every_room_has_files() -> None:
    names = [dotted(file) for file in PACKAGE.rglob("*.py")]
    lost = [name for name in names if room_of(name) == "__init__" and name not in ("", "parallel")]
    assert not lost and {room_of(name) for name in names} == set(LEVELS)


def test_the_development_guide_names_every_folder() -> None:
    guide = (ROOT / "examples" / "guides" / "development.md").read_text()
    tests = {f.relative_to(ROOT / "tests") for f in (ROOT / "tests").rglob("test_*.py")}
    wings = {file.parent.name for file in PACKAGE.rglob("__init__.py")} - {PACKAGE.name, "parallel"}
    folders = wings | {file.parts[0] for file in tests}
    missing = {n for n in folders if not re.search(rf"(`|/){n}(`|/|\.py`)|-m {n}`", guide)}
    assert len(tests) > 50 and not missing, missing
    assert all(len(file.parts) == 2 for file in tests), "a test is in no folder, or in two"
