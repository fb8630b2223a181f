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
    ["state", "checkpointing", "monitor"],
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

WINGS = {
    ".".join(file.parent.relative_to(PACKAGE).parts)
    for file in PACKAGE.rglob("__init__.py")
    if file.parent not in (PACKAGE, PACKAGE / "parallel")
}
LEVELS = {room: level for level, floor in enumerate(reversed(FLOORS)) for room in floor}


def room_of(module: str) -> str:
    """The wing that a module belongs to, or the module itself, without the package's name."""
    parts = module.split(".")[1:]
    depth = 2 if parts[:1] == ["parallel"] else 1
    return ".".join(parts[:depth]) or "__init__"


def imports(file: Path) -> Iterator[tuple[str, str]]:
    """Module and name of all that a file imports from the package."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning_dp"):
            yield from ((str(node.module), alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            yield from ((name, "") for name in names if name.startswith("lightning_dp"))


def arrows() -> Iterator[tuple[str, str, str, str, str]]:
    """File, its room, the imported room, the module and the name, where a room imports another."""
    for file in PACKAGE.rglob("*.py"):
        parts = file.relative_to(PACKAGE).with_suffix("").parts
        module = ".".join(("lightning_dp", *(p for p in parts if p != "__init__")))
        here = room_of(module)
        for target, name in imports(file):
            is_module = (PACKAGE / Path(*target.split(".")[1:]) / f"{name}.py").exists()
            is_room = target in ("lightning_dp", "lightning_dp.parallel")
            there = room_of(f"{target}.{name}" if is_module and is_room else target)
            if here != there:
                yield ".".join(parts), here, there, target, name


def test_a_room_imports_only_rooms_below_it() -> None:
    found = {arrow[1:3] for arrow in arrows()}
    up = [f"{here} imports {there}" for here, there in found if LEVELS[there] >= LEVELS[here]]
    assert len(found) > 50 and not up, sorted(up)


def test_only_the_app_imports_hydra() -> None:
    pattern = re.compile(r"^\s*(?:import|from)\s+(?:hydra|omegaconf)\b", re.MULTILINE)
    files = [file for file in PACKAGE.rglob("*.py") if pattern.search(file.read_text())]
    assert {file.relative_to(PACKAGE).parts[0] for file in files} == {"app"}


def test_every_room_has_a_floor() -> None:
    files = {".".join(f.relative_to(PACKAGE).with_suffix("").parts) for f in PACKAGE.rglob("*.py")}
    rooms = {room_of(f"lightning_dp.{name}") for name in files if name != "parallel.__init__"}
    assert rooms == set(LEVELS)


def test_the_development_guide_names_every_folder() -> None:
    guide = (ROOT / "examples" / "guides" / "development.md").read_text()
    tests = {f.relative_to(ROOT / "tests") for f in (ROOT / "tests").rglob("test_*.py")}
    folders = {wing.rsplit(".")[-1] for wing in WINGS} | {file.parts[0] for file in tests}
    missing = {n for n in folders if not re.search(rf"(`|/){n}(`|/|\.py`)|-m {n}`", guide)}
    assert len(tests) > 50 and not missing, missing
    assert all(len(file.parts) == 2 for file in tests), "a test is in no folder, or in two"
