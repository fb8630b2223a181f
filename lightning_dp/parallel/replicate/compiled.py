"""Modules and functions that `torch.compile` has made, on replicas.

Compiling in several threads at once is unsafe, so replicas with compiled parts run in order. These
are found on the module, in its classes, and in what the functions of its classes know by name;
others are noticed when they are compiled, and replicas run in order from the next step on.

There may be a graph per replica: dynamo's limit of recompilations is raised accordingly.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from lightning_dp.parallel.torch_private import (
    compilation_counts,
    compiled_function,
    compiled_inner,
    more_recompilations,
)


class Compilations:
    """Whether calls compile (`are_known`), and how often they have so far (`counts()["total"]`)."""

    def __init__(self, root: nn.Module, replicas: int) -> None:
        self._replicas = replicas
        self.are_known = compiles(root)
        self.counts = compilation_counts()

    def as_often(self) -> AbstractContextManager[None]:
        """In this context each replica may compile as often as one device would."""
        return more_recompilations(self._replicas)


def compiles(module: nn.Module) -> bool:
    """Whether a module has compiled parts."""
    modules = list(module.modules())
    classes = {cls for each in modules for cls in type(each).__mro__}
    return any(
        compiled_inner(each) is not None or any(map(is_compiled, each.__dict__.values()))
        for each in modules
    ) or any(is_compiled(known) for cls in classes for known in _known_to(cls))


def is_compiled(value: Any) -> bool:
    """Whether a value is a compiled function, or a container of one."""
    kind = type(value)
    if kind is FunctionType:
        return compiled_function(value) is not None
    if kind in (list, tuple):
        return any(map(is_compiled, value))
    if kind is dict:
        return any(map(is_compiled, value.values()))
    if kind is partial:
        return is_compiled(value.func)
    return kind is MethodType and is_compiled(value.__func__)


def compiled_attributes(original: nn.Module, twin: nn.Module) -> dict[str, Any]:
    """What a replica's `torch.compile(module)` has for itself: the calls of its inner module."""
    inner = compiled_inner(twin)
    if inner is None:
        return {}
    # The root's wrapper has been compiled with options that only its context knows.
    compiled = type(original)(inner, original.dynamo_ctx)
    tables = nn.Module().__dict__.keys() | {"dynamo_ctx"}
    return {name: value for name, value in compiled.__dict__.items() if name not in tables}


def _known_to(cls: type) -> Iterator[Any]:
    """The functions of a class of users, and what these know by name."""
    if cls.__module__.partition(".")[0] in ("torch", "builtins"):
        return
    for member in vars(cls).values():
        function = getattr(member, "fget", None) or getattr(member, "__func__", member)
        if isinstance(function, FunctionType):
            yield function
            yield from _named_in(function.__code__, function.__globals__)


def _named_in(code: CodeType, names: dict[str, Any]) -> Iterator[Any]:
    """Values of global names, and of those that stand after the name of a Python module."""
    for name in code.co_names:
        value = names.get(name)
        if issubclass(type(value), ModuleType):
            members = vars(value)
            yield from (members[other] for other in code.co_names if other in members)
        else:
            yield value
