"""The house: which wing may import which, and that a wing offers what its `__init__` names."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from program_runs import ROOT

PACKAGE = ROOT / "lightning_dp"

FLOORS = [
    ["__main__"],
    ["app"],
    ["doctor"],
    ["__init__"],
    ["pytorch_lightning"],
    ["strategy"],
    ["first_step", "measured"],
    ["options"],
    ["auto_split"],
    ["step_mode", "forward_mode"],
    ["mode"],
    ["layer_sync", "metrics"],
    ["state", "checkpointing", "monitor"],
    ["processes", "table"],
    ["lightning_private", "user_hooks"],
    ["parallel.data_parallel"],
    ["parallel.check"],
    ["parallel.stages"],
    ["parallel.forward_losses"],
    ["parallel.step", "parallel.forward", "parallel.functional"],
    ["parallel.out_of_memory"],
    ["parallel.engine"],
    ["parallel.call", "parallel.reduce", "parallel.usage"],
    ["parallel.replicate", "parallel.apply", "parallel.likely_cause"],
    ["parallel.processes"],
    ["parallel.gather"],
    ["parallel.scatter"],
    ["parallel.comm"],
    ["parallel.split", "parallel.devices", "parallel.errors", "parallel.state_keys"],
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


@pytest.mark.parametrize("here, there", sorted({arrow[1:3] for arrow in arrows()}))
def test_a_room_imports_what_is_below_it(here: str, there: str) -> None:
    assert LEVELS[there] < LEVELS[here], f"{here} imports {there}, which is not below it"


def test_a_program_is_asked_for_what_its_room_offers() -> None:
    rooms = {f"lightning_dp.{wing}" for wing in WINGS if wing.startswith("app.")}
    past = [
        f"{file} imports {name} from {target}"
        for file in (PACKAGE / "app").rglob("*.py")
        for target, name in imports(file)
        for room in rooms
        if target.startswith(f"{room}.") and room != f"lightning_dp.app.{file.parent.name}"
    ]
    assert rooms and not past, past


def test_every_room_has_its_floor() -> None:
    files = {".".join(f.relative_to(PACKAGE).with_suffix("").parts) for f in PACKAGE.rglob("*.py")}
    rooms = {room_of(f"lightning_dp.{name}") for name in files if name != "parallel.__init__"}
    assert rooms == set(LEVELS)


def test_every_split_is_importable_by_its_name() -> None:
    from lightning_dp.parallel.split import by_cost, chunk, even, minimax, weighted

    assert even(9, 4) == (3, 2, 2, 2) and chunk(9, 4) == (3, 3, 3, 0)
    assert weighted(8, [1, 3]) == (2, 6) and minimax(4, [0, 0], [1, 1]) == (2, 2)
    assert by_cost([3, 1], 2) == [[0], [1]]


IGNORE = re.compile(r"# (?:noqa\b(: [A-Z]+\d+)?|type: ignore\b(\[[\w,-]+\])?)")


def ignores(text: str) -> Iterator[tuple[str, bool]]:
    """Lines that a checker is told to pass over; whether they say in what, and then why."""
    for line in text.splitlines():
        found = list(IGNORE.finditer(line))
        if found:
            ends_with_why = re.match(r"  # \S+.*$", line[found[-1].end() :]) is not None
            yield line.strip(), ends_with_why and all(any(m.groups()) for m in found)


def test_what_checkers_are_told_to_pass_over_has_its_reason_on_the_line() -> None:
    folders = ("lightning_dp", "examples", "conf", "tests")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    found = [ignored for file in files for ignored in ignores(file.read_text())]
    bare = [line for line, has_why in found if not has_why and "IGNORE = " not in line]
    assert len(found) > 20 and not bare, "\n".join(bare)
    mark = "#"
    for words in ("noqa", "noqa: E501", "type: ignore", "type: ignore  # why", "noqa: E501 why"):
        assert [why for _, why in ignores(f"x = 1  {mark} {words}")] == [False], words


def test_the_guide_has_a_line_for_every_wing() -> None:
    guide = (ROOT / "examples" / "guides" / "how-it-works.md").read_text()
    lines = [line.split("|")[1] for line in guide.splitlines() if line.startswith("|")]
    folders = {f"`{wing.replace('.', '/')}/`" for wing in WINGS if not wing.startswith("app.")}
    missing = {folder for folder in folders if not any(folder in line for line in lines)}
    assert not missing, missing


def test_every_test_is_in_a_folder_that_the_guide_has_a_line_for() -> None:
    guide = (ROOT / "examples" / "guides" / "how-it-works.md").read_text()
    found = {file.relative_to(ROOT / "tests") for file in (ROOT / "tests").rglob("test_*.py")}
    alone = sorted(str(file) for file in found if len(file.parts) != 2)
    assert not alone, alone
    missing = {file.parts[0] for file in found if f"`{file.parts[0]}/`" not in guide}
    assert len(found) > 100 and not missing, missing
