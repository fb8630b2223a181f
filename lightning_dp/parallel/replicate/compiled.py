"""Modules and functions that `torch.compile` has made, on replicas.

Compiling in several threads at once is unsafe, so replicas with compiled parts run in order. These
are found on the module by the copier, in its classes, and in what the functions of its classes know
by name; others are noticed when they are compiled, and replicas run in order from the next step on.

There may be a graph per replica: dynamo's limit of recompilations is raised accordingly.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import FunctionType
from typing import Any

from torch import nn

from lightning_dp.parallel.torch_private import (
    compiled_function,
    compiled_inner,
    more_recompilations,
)


class Compilations:
    """Knows whether the module compiles anything (`are_known`), and raises dynamo's limits."""

    def __init__(self, root: nn.Module, replicas: int) -> None:
        self._replicas = replicas
        modules = list(root.modules())
        classes = {cls for module in modules for cls in type(module).__mro__}
        self.are_known = any(compiled_inner(module) is not None for module in modules) or any(
            compiled_function(value) is not None for cls in classes for value in _known_to(cls)
        )

    def as_often(self) -> AbstractContextManager[None]:
        """In this context each replica may compile as often as one device would."""
        return more_recompilations(self._replicas)


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
    """The functions of a class of users, and the values of global names in them."""
    if cls.__module__.partition(".")[0] in ("torch", "builtins"):
        return
    for member in vars(cls).values():
        function = getattr(member, "fget", None) or getattr(member, "__func__", member)
        if isinstance(function, FunctionType):
            yield function
            yield from map(function.__globals__.get, function.__code__.co_names)
