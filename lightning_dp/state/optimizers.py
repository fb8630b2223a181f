"""Optimizers, schedules and gradient scalers that a step can get hold of: replicas share them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from itertools import chain
from types import FunctionType
from typing import Any, TypeAlias

from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from lightning_dp.parallel.contexts import Lasting
from lightning_dp.parallel.replicas import Replicas
from lightning_dp.parallel.workers import current_participant

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


class no_step_of_one_replica(Lasting):
    """While it lasts, no replica alone makes a step of an optimizer of the module's parameters.

    All would make it, at the same time and each with its own samples' gradients.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._handle: RemovableHandle | None = None

    def begin(self) -> None:
        """Looks at all optimizers."""
        self._handle = register_optimizer_step_pre_hook(self._check)

    def end(self) -> None:
        """No longer."""
        if self._handle is not None:
            self._handle.remove()

    def _check(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        participant = current_participant()
        if participant is None:
            return
        own = set(map(id, chain.from_iterable(self._replicas.parameters)))
        if any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            raise RuntimeError(
                "Expected steps of optimizers of the module's parameters to be made once for all "
                f"replicas, got {type(optimizer).__qualname__}.step from replica "
                f"{participant.replica}, in a way that does not show before the step. With "
                "automatic_optimization=False call optimizer.step() of an optimizer that "
                "configure_optimizers returns or that is an attribute of self, or use "
                'DataParallelStrategy(mode="forward").'
            )
