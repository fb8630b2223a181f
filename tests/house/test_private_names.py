"""Names with a leading underscore that are somebody else's stand in a few rooms, and nowhere else.

Ours is what the same file defines; on `self`, what a class of ours defines and no class that it
comes from. The strings that `getattr` and `__dict__` are asked with count, too.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from program_runs import ROOT
from torch import nn
from torchmetrics import MeanMetric, MetricCollection

PACKAGE = ROOT / "lightning_dp"
ROOMS = (
    "lightning_private.py",
    "parallel/torch_private.py",
)

PUBLIC = {
    "_fields": "of named tuples: documented, the underscore is there for the sake of field names",
    "_replace": "of named tuples: likewise",
    "_current_frames": "of sys: documented",
    "_is_gil_enabled": "of sys: documented",
    "_exit": "of os: documented",
    "_repr_png_": "of IPython: documented",
    "_target_": "of Hydra's configs: documented",
    "_convert_": "of Hydra's configs: documented",
    "_partial_": "of Hydra's configs: documented",
}
"""Names that begin with an underscore and are public all the same."""

MODULES = {"_C", "_autograd", "_device", "_python_dispatch", "_utils"}
"""Private modules: their tests are those of what is in them."""

FILES = sorted(str(f.relative_to(PACKAGE)) for f in PACKAGE.rglob("*.py"))


def is_private(name: str) -> bool:
    """Whether a name, or a part of a dotted one, has one leading underscore and is not just that.

    Example:
        >>> [is_private(name) for name in ("_version", "torch._C", "__dict__", "_", "a_b")]
        [True, True, False, False, False]
    """
    return any(re.fullmatch(r"_(?!_)\w+", part) and part not in PUBLIC for part in name.split("."))


@cache
def of_others() -> frozenset[str]:
    """Private names of objects that the package handles: none of ours may be mistaken for one."""
    classes = [nn.Module, LightningModule, torch.Tensor, torch.optim.Optimizer, Trainer]
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    metrics = MetricCollection([MeanMetric()])
    objects = [nn.Module(), nn.Linear(1, 1), LightningModule(), metrics, *metrics.values()]
    objects += [trainer, trainer.fit_loop, trainer.fit_loop.epoch_loop, DDPStrategy()]
    objects += [torch, torch.autograd, torch.optim.SGD([nn.Parameter(torch.ones(1))]), *classes]
    names = {name for each in objects for name in (*dir(each), *getattr(each, "__dict__", ()))}
    return frozenset(filter(is_private, names))


def defined_in(tree: ast.AST) -> set[str]:
    """The private names that a piece of code defines: of functions, attributes, slots and so on."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names |= {node.attr} if _is_self(node.value) else set()
    return set(filter(is_private, names))


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _inside_classes(tree: ast.AST) -> set[ast.AST]:
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return {node for each in classes for node in ast.walk(each)}


def _no_names(tree: ast.AST) -> set[ast.AST]:
    """Strings that name no attribute of an object: slots of ours, parts of longer strings."""
    slots = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        or (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__slots__")
    ]
    return {part for node in slots for part in ast.walk(node)}


def foreign_names(source: str) -> list[tuple[int, str]]:
    """Line and name of what a file touches that it does not define, or that others define too."""
    tree = ast.parse(source)
    ours = defined_in(tree) - of_others()
    in_classes, no_names = _inside_classes(tree), _no_names(tree)
    return sorted(
        (node.lineno, name)
        for node in ast.walk(tree)
        for name in _touched(node)
        if is_private(name)
        and name not in ours
        and node not in no_names
        and not (isinstance(node, ast.Attribute) and _is_self(node.value) and node in in_classes)
    )


def _touched(node: Any) -> Iterator[str]:
    if isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.ImportFrom) and (node.module or "") != "__future__":
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield from [node.value] if re.fullmatch(r"[\w.]*\w", node.value) else []
    elif isinstance(node, ast.keyword) and node.arg is not None:
        yield node.arg


def inherited_names(module: str) -> list[tuple[str, str]]:
    """Class and name of what the classes of a module touch or replace of those they come from."""
    members = vars(importlib.import_module(module)).values()
    classes = [c for c in members if inspect.isclass(c) and c.__module__ == module]
    return sorted((cls.__name__, name) for cls in classes for name in _names_on_self(cls))


def _names_on_self(cls: type) -> set[str]:
    ours = [c for c in cls.__mro__ if c.__module__.startswith("lightning_dp")]
    theirs = [c for c in cls.__mro__ if c not in ours and c.__module__ != "builtins"]
    defined = set().union(*(defined_in(_tree_of(c)) for c in ours))
    used = {
        node.attr
        for each in ours
        for node in ast.walk(_tree_of(each))
        if isinstance(node, ast.Attribute) and _is_self(node.value) and is_private(node.attr)
    }
    names = set().union(*(vars(c).keys() | defined_in(_tree_of(c)) for c in theirs))
    return (used - defined) | ((used | defined) & set(filter(is_private, names)))


@cache
def _tree_of(cls: type) -> ast.AST:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError):  # written in C, or made by a decorator
        return ast.Module([], [])


def _module_of(file: str) -> str:
    parts = [part for part in Path(file).with_suffix("").parts if part != "__init__"]
    return ".".join(("lightning_dp", *parts))


def _found_in(file: str) -> list[tuple[int | str, str]]:
    source = (PACKAGE / file).read_text()
    inherited = [] if file == "__main__.py" else inherited_names(_module_of(file))
    return [*foreign_names(source), *inherited]


@pytest.mark.parametrize("file", [file for file in FILES if file not in ROOMS])
def test_only_these_rooms_touch_private_names_of_others(file: str) -> None:
    found = _found_in(file)
    assert not found, f"{file}: give these a function in {' or '.join(ROOMS)}: {found}"


@pytest.mark.parametrize("room", ROOMS)
def test_each_private_name_has_a_test_that_is_named_after_it(room: str) -> None:
    touched = {name.rpartition(".")[2] for _, name in foreign_names((PACKAGE / room).read_text())}
    (file,) = (ROOT / "tests").rglob(f"test_{Path(room).stem}.py")
    tests = ast.parse(file.read_text())
    named = [node.name for node in ast.walk(tests) if isinstance(node, ast.FunctionDef)]
    # A test of several names has them as parameters.
    named += [part.value for part in ast.walk(tests) if isinstance(part, ast.Constant)]
    text = " ".join(name for name in named if isinstance(name, str) and " " not in name)
    missing = sorted(name for name in touched - MODULES if name.strip("_") not in text)
    assert not missing, f"no test is named after {missing}"
