"""ModuleStructure: what a module is made of, and what of it may have changed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from itertools import chain
from operator import is_not, itemgetter
from typing import Any

import torch
from torch import nn

from lightning_dp.parallel.replicas.hidden_layers import layers_in
from lightning_dp.parallel.torch_compile import compiled_call
from lightning_dp.parallel.torch_private import (
    FIXED_NAMES,
    buffer_table,
    child_table,
    hook_tables,
    parameter_table,
)

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class ReplicaRules:
    """What is special about some modules when they are replicated; by default nothing is."""

    def on_build(self, leaves: list[nn.Module]) -> None:
        """Told which of the root's modules are leaves whenever replicas are built."""

    def is_leaf(self, module: nn.Module) -> bool:
        """Whether `copy_leaf` copies this module with all that is in it."""
        return False

    def copy_leaf(self, module: nn.Module, k: int, device: torch.device) -> nn.Module:
        """Replica k's own copy of a leaf module."""
        return copy.deepcopy(module).to(device)

    def own_attributes(self, module: nn.Module, k: int, device: torch.device) -> dict[str, Any]:
        """Attributes that replica k of a module keeps for itself instead of following the root."""
        return {}


class ModuleStructure:
    """The submodules, parameters and buffer tables of a module, each once and in a fixed order."""

    def __init__(self, root: nn.Module, rules: ReplicaRules) -> None:
        self.root = root
        self.modules: list[nn.Module] = []
        self.leaves: list[nn.Module] = []
        self._walk(root, rules, set())
        parameter_tables = list(map(parameter_table, self.modules))
        unique = {id(p): p for table in parameter_tables for p in table.values() if p is not None}
        self.parameters: list[nn.Parameter] = list(unique.values())
        self.buffer_tables = list(map(buffer_table, self.modules))
        self._with_buffers = [m for m in self.modules if buffer_table(m)]
        self.attributes = AttributeVersions([m.__dict__ for m in self.modules])
        # Hooks by their numbers: every one has its own, for good.
        fixed: list[dict[str, Any]] = [*parameter_tables, *map(child_table, self.modules)]
        hooks: list[dict[int, Any]] = list(chain.from_iterable(map(hook_tables, self.modules)))
        tables: list[dict[Any, Any]] = [*fixed, *self.buffer_tables, *hooks]
        self._empty_tables = [table for table in tables if not table]
        self._filled_tables = [table for table in tables if table]
        self._lengths = list(map(len, self._filled_tables))
        self._live: list[Iterable[Any]] = [
            *(t.values() for t in fixed if t),
            *(t.keys() for t in hooks if t),
        ]
        self._entries = list(chain.from_iterable(self._live))

    def _walk(self, module: nn.Module, rules: ReplicaRules, seen: set[int]) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        _check_replicable(module)
        if rules.is_leaf(module):
            self.leaves.append(module)
            return
        self.modules.append(module)
        for child in child_table(module).values():
            if child is not None:
                self._walk(child, rules, seen)
        for name, value in module.__dict__.items():
            for _, hidden in layers_in(value, name):
                if rules.is_leaf(hidden):  # it is replicated by hand, wherever it is kept
                    self._walk(hidden, rules, seen)

    def has_changed(self) -> bool:
        """Whether a parameter, submodule, buffer name or hook came, went or was replaced."""
        return (
            any(self._empty_tables)
            or list(map(len, self._filled_tables)) != self._lengths
            or any(map(is_not, chain.from_iterable(self._live), self._entries))
        )

    def reads_buffers(self) -> bool:
        """Whether a forward may read a buffer. Batch norm in training writes to its own only."""
        return any(type(m) not in _NORMS or not m.training for m in self._with_buffers)


class AttributeVersions:
    """The attributes of modules that are neither parameters, buffers nor submodules.

    `versions` has a number for each module, which grows when one is bound anew, comes or goes.
    """

    def __init__(self, modules: list[dict[str, Any]]) -> None:
        self._now = modules
        self.versions = [0] * len(modules)
        self._names: list[set[str]] = [set() for _ in modules]
        self._seen: list[tuple[Any, ...]] = [()] * len(modules)
        self._getters: list[Callable[[Any], tuple[Any, ...]]] = [tuple] * len(modules)
        self._learn_names()

    def look(self) -> list[int]:
        """Compares with the last look; the versions."""
        try:
            values = [get(now) for get, now in zip(self._getters, self._now, strict=True)]
        except KeyError:  # one went
            values = []
        # All at once first: nearly always nothing has changed.
        if not values or list(map(len, self._now)) != self._sizes:
            self._learn_names()
        elif any(map(is_not, chain.from_iterable(values), chain.from_iterable(self._seen))):
            self._compare(values)
        return self.versions

    def _compare(self, values: list[tuple[Any, ...]]) -> None:
        for j, pair in enumerate(zip(values, self._seen, strict=True)):
            self.versions[j] += len(pair[0]) != len(pair[1]) or any(map(is_not, *pair))
        self._seen = values

    def _learn_names(self) -> None:
        self._sizes = list(map(len, self._now))
        # itemgetter returns a tuple, as of three names at least: `training` and tables of hooks.
        for j, now in enumerate(self._now):
            names = now.keys() - FIXED_NAMES
            if names != self._names[j]:
                self._names[j] = names
                self._getters[j] = itemgetter(*names)
                self._seen[j] = ()
        self._compare([get(now) for get, now in zip(self._getters, self._now, strict=True)])


def _check_replicable(module: nn.Module) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError(
            f"Expected modules written in Python, got {type(module).__qualname__}, which "
            "torch.jit compiled and which cannot be replicated. Use the original module, or "
            "one device."
        )
    if compiled_call(module) is not None:
        raise ValueError(
            f"Expected modules that are not compiled in place, got {type(module).__qualname__}, "
            "whose compile() was called: it would compute with the root's weights on every "
            "replica. Write module.layer = torch.compile(module.layer) instead."
        )
    for name, parameter in parameter_table(module).items():
        if parameter is not None and nn.parameter.is_lazy(parameter):
            raise ValueError(
                f"Expected initialised parameters, got {type(module).__qualname__}.{name}, whose "
                "shape is not known yet. Run one batch through the module before training."
            )
