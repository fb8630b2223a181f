"""Private names of torch, Lightning and torchmetrics: they stand in two files.

That a name is there, and means what it did, is tested where the package uses it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch import LightningModule
from support.programs import ROOT
from torch import nn

from lightning_dp import lightning_private
from lightning_dp.parallel import torch_private as private

PACKAGE = ROOT / "lightning_dp"
FILES = {str(f.relative_to(PACKAGE)): ast.parse(f.read_text()) for f in PACKAGE.rglob("*.py")}
ROOMS = ("lightning_private.py", "parallel/torch_private.py")
PUBLIC = {
    *("_fields", "_replace", "_make"),  # of named tuples
    *("_current_frames", "_is_gil_enabled", "_exit"),  # of sys and os: documented
    "_repr_png_",  # of IPython
    *("_target_", "_convert_", "_partial_"),  # of Hydra's configs
}


def used(tree: ast.AST) -> Iterator[str]:
    """Private names in a file: attributes, imports, and those that `getattr` is given."""
    for node in ast.walk(tree):
        names: list[Any] = []
        if isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names = [name for alias in node.names for name in alias.name.split(".")]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            names = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
        yield from (n for n in map(str, names) if re.fullmatch(r"_(?!_)\w+", n) and n not in PUBLIC)


def defined(tree: ast.AST) -> Iterator[str]:
    """Functions, classes, arguments, variables and attributes that a file defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def test_private_names_of_others_stand_in_two_files() -> None:
    ours = {name for file in FILES if file not in ROOMS for name in defined(FILES[file])}
    found = {file: {*used(tree)} - ours for file, tree in FILES.items() if file not in ROOMS}
    found = {file: names for file, names in found.items() if names}
    assert not found, f"give these a function in {' or '.join(ROOMS)}: {found}"


def test_private_names_are_looked_up_when_they_are_used() -> None:
    """At import, a name that a release of torch has renamed would break the whole package."""
    body = FILES["parallel/torch_private.py"].body
    at_import = [node for node in body if not isinstance(node, ast.FunctionDef | ast.ClassDef)]
    names = [n.attr for node in at_import for n in ast.walk(node) if isinstance(n, ast.Attribute)]
    assert not [name for name in names if name.startswith("_")]


# --- what is built of them ------------------------------------------------------------------------


def test_a_name_that_is_gone_is_an_error_with_the_release() -> None:
    release = f"lightning {lightning.__version__}"
    with pytest.raises(RuntimeError, match=f"to have _gone, got {release} without it"):
        lightning_private.found(LightningModule(), "_gone")


def test_hook_tables_and_fixed_names_are_all_there() -> None:
    names = {name for name in vars(nn.Module()) if "hooks" in name and "state_dict" not in name}
    assert names == set(private.HOOK_TABLES)
    net = nn.Linear(1, 1)
    before = {name: vars(net)[name] for name in private.FIXED_NAMES}
    for add in (net.register_forward_hook, net.register_forward_pre_hook):
        add(print, with_kwargs=True)
    net.register_full_backward_hook(print)
    net.load_state_dict(net.double().eval().state_dict())
    changed = {name for name, value in before.items() if vars(net)[name] is not value}
    assert changed <= {"_is_full_backward_hook"}  # None before the first hook


def test_a_view_is_not_alone_in_its_memory() -> None:
    tensor = torch.ones(4)
    view = tensor.view(2, 2)
    assert not private.is_alone_in_memory(tensor) and not private.is_alone_in_memory(view)
    del view
    assert private.is_alone_in_memory(tensor)
