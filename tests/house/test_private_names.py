"""Private names of torch, Lightning and torchmetrics stand in two files, and each has a test."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.programs import ROOT

PACKAGE = ROOT / "lightning_dp"
FILES = {str(f.relative_to(PACKAGE)): ast.parse(f.read_text()) for f in PACKAGE.rglob("*.py")}
ROOMS = ("lightning_private.py", "parallel/torch_private.py")
PUBLIC = {
    *("_fields", "_replace", "_make"),  # of named tuples
    *("_current_frames", "_is_gil_enabled", "_exit"),  # of sys and os: documented
    "_repr_png_",  # of IPython
    *("_target_", "_convert_", "_partial_"),  # of Hydra's configs
}
MODULES = {"_C", "_autograd", "_device", "_python_dispatch", "_utils"}
"""Private modules: their tests are those of the names in them."""


def is_private(name: str) -> bool:
    """Whether a part of a dotted name has one leading underscore.

    Example:
        >>> [is_private(name) for name in ("_version", "torch._C", "__dict__", "_", "a_b")]
        [True, True, False, False, False]
    """
    return any(re.fullmatch(r"_(?!_)\w+", part) and part not in PUBLIC for part in name.split("."))


def defined_in(tree: ast.AST) -> set[str]:
    """The private functions, classes, arguments, variables and attributes that a file defines."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names |= {node.attr} if ast.unparse(node.value) in ("self", "cls") else set()
    return names


def touched(tree: ast.AST) -> Iterator[tuple[int, str, bool]]:
    """Line and name of each private name in a file, and whether it is one of `self`."""
    for node in ast.walk(tree):
        names, of_self = list[str](), False
        if isinstance(node, ast.Attribute):
            names, of_self = [node.attr], ast.unparse(node.value) in ("self", "cls")
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Call):  # getattr(x, "_name"), hasattr, setattr
            names = [a.value for a in node.args if isinstance(a, ast.Constant)]
        yield from (
            (node.lineno, name, of_self)  # type: ignore[attr-defined]  # these nodes have a line
            for name in names
            if isinstance(name, str) and re.fullmatch(r"[\w.]+", name) and is_private(name)
        )


def foreign_names(file: str) -> list[tuple[int, str]]:
    """Private names that a file uses and that it (on `self`: the package) does not define."""
    ours, everywhere = defined_in(FILES[file]), set().union(*map(defined_in, FILES.values()))
    found = list(touched(FILES[file]))
    return [(line, name) for line, name, own in found if name not in (everywhere if own else ours)]


def test_private_names_of_others_stand_in_two_files() -> None:
    found = {file: foreign_names(file) for file in FILES if file not in ROOMS}
    found = {file: names for file, names in found.items() if names}
    assert not found, f"give these a function in {' or '.join(ROOMS)}: {found}"


@pytest.mark.parametrize("room", ROOMS)
def test_each_private_name_has_a_test_that_is_named_after_it(room: str) -> None:
    names = {name.rpartition(".")[2] for _, name in foreign_names(room)}
    tests = ast.parse((ROOT / "tests" / "house" / f"test_{Path(room).stem}.py").read_text())
    named = [node.name for node in ast.walk(tests) if isinstance(node, ast.FunctionDef)]
    # A test of several names has them as parameters.
    named += [part.value for part in ast.walk(tests) if isinstance(part, ast.Constant)]
    text = " ".join(name for name in named if isinstance(name, str) and " " not in name)
    missing = sorted(name for name in names - MODULES if name.strip("_") not in text)
    assert len(names) > 5 and not missing, f"no test is named after {missing}"
