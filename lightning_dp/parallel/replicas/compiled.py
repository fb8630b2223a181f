"""Compiled parts of modules, submodules or functions, on replicas.

`torch.compile` compiles during calls. It does so once at a time, but what it looks at to tell
whether it has to is not safe from other threads: now and then it would compile for no reason. So
replicas with compiled parts run in order. They are found on the module (`self.net`, `self.loss`),
in its classes, and in what the functions of its classes know by name. Others are noticed when they
are compiled: from the next step on replicas run in order.

All replicas run the same code, for which there may be as many graphs as replicas; so it may be
compiled so many times as often as on one device before it is given up.
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
    """What calls of a module and its replicas may compile.

    If `are_known` they may; `counts()["total"]` tells how often anything was compiled so far.
    """

    def __init__(self, root: nn.Module, replicas: int) -> None:
        self._replicas = replicas
        self.are_known = compiles(root)
        self.counts = compilation_counts()

    def as_often(self) -> AbstractContextManager[None]:
        """While it lasts, each replica may compile as much as one device would."""
        return more_recompilations(self._replicas)


def compiles(module: nn.Module) -> bool:
    """Whether a module has compiled parts: its replicas are then to run in order."""
    modules = list(module.modules())
    classes = {cls for each in modules for cls in type(each).__mro__}
    return any(
        compiled_inner(each) is not None or any(map(is_compiled, each.__dict__.values()))
        for each in modules
    ) or any(is_compiled(known) for cls in classes for known in _known_to(cls))


def is_compiled(value: Any) -> bool:
    """Whether a value is a compiled function, or a container of one. It is not asked itself."""
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
    """What a replica's wrapper (`twin`) has for itself: the calls of its own inner module."""
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
