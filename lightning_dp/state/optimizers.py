"""Optimizers, schedules and gradient scalers that a step can get hold of."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any, TypeAlias

from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

Tool: TypeAlias = Optimizer | LRScheduler | GradScaler

_TOOLS = (Optimizer, LRScheduler, GradScaler)
_FEW = 16
"""Entries of a container on `self` that may hold tools: more of them are something else."""

_PACKAGES = ("torch.", "lightning.", "pytorch_lightning.")
_CONTENTS = ("state", "param_groups", "defaults")


def tools_of(module: nn.Module, known: Iterable[Any]) -> list[Tool]:
    """Those that are known, those on the module, and those that such ones have inside."""
    found: dict[int, Tool] = {}
    for value in known:
        _look(value, found)
    for submodule in module.modules():
        if not type(submodule).__module__.startswith("torch."):
            for value in vars(submodule).values():
                _look(value, found)
    return list(found.values())


def _look(value: Any, found: dict[int, Tool]) -> None:
    if issubclass(type(value), _TOOLS):  # without asking the value, which may be anything
        if id(value) not in found:
            found[id(value)] = value
            for name, held in vars(value).items():
                if name not in _CONTENTS:
                    _look(held, found)
    elif type(value) in (list, tuple, dict) and len(value) <= _FEW:
        for item in value.values() if type(value) is dict else value:
            if issubclass(type(item), _TOOLS):
                _look(item, found)


def own_methods(optimizer: Optimizer) -> list[str]:
    """Public methods that an optimizer's class adds to torch's, such as the `first_step` of SAM."""
    names: dict[str, None] = {}
    for cls in type(optimizer).__mro__:
        if f"{cls.__module__}.".startswith(_PACKAGES) or cls is object:
            continue
        for name, value in vars(cls).items():
            is_method = isinstance(value, FunctionType) and not hasattr(Optimizer, name)
            # What makes a context manager is entered by every replica.
            if is_method and name[0] != "_" and not _is_generator(value):
                names[name] = None
    return list(names)


def _is_generator(function: Callable[..., Any]) -> bool:
    return inspect.isgeneratorfunction(inspect.unwrap(function))
