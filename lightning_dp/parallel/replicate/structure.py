"""What a module is made of: its submodules, parameters and buffers, each once, in a fixed order."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dp.parallel.torch_private import (
    buffer_table,
    child_table,
    hook_tables,
    parameter_table,
)


class ReplicaRules:
    """How special submodules are replicated; by default none is special."""

    def has_own_buffer_rules(self, module: nn.Module) -> bool:
        """Whether a module's buffers are joined elsewhere, as those of torchmetrics' metrics."""
        return False

    def own_attributes(
        self, module: nn.Module, twin: nn.Module, k: int, device: torch.device
    ) -> dict[str, Any]:
        """What replaces attributes of a module on replica k, where `twin` stands for it."""
        return {}


class ModuleStructure:
    """The modules of a root, and its tensors that are replicated: those on the root's device.

    Modules that a list, tuple or dict on a module holds without registering them belong to it.

    Attributes:
        modules: the modules.
        has_own_rules: the ids of those with own buffer rules.
        parameters: the parameters.
        buffer_tables: the modules' buffers by name.
        owners: what has attributes: modules and parameters.
        tables: they get other items where a parameter, submodule, buffer or hook comes or goes.
    """

    def __init__(
        self, root: nn.Module, rules: ReplicaRules, device: torch.device | None = None
    ) -> None:
        self.device = device
        self.modules: list[nn.Module] = []
        self.has_own_rules: set[int] = set()
        self._walk(root, rules, set())
        bound = list(map(parameter_table, self.modules))
        found = chain.from_iterable(map(dict.values, bound))
        unique: dict[int, nn.Parameter] = {id(p): p for p in found if self.is_replicated(p)}
        self.parameters = list(unique.values())
        self.buffer_tables = list(map(buffer_table, self.modules))
        self.owners: list[Any] = [*self.modules, *self.parameters]
        bound += map(child_table, self.modules)
        # Buffers are compared by their names, hooks by their numbers, which are never used again.
        named = chain(self.buffer_tables, *map(hook_tables, self.modules))
        self.tables: list[Collection[Any]] = [*map(dict.values, bound), *map(dict.keys, named)]

    def _walk(
        self, module: nn.Module, rules: ReplicaRules, seen: set[int], has_own_rules: bool = False
    ) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        _check_replicable(module)
        self.modules.append(module)
        has_own_rules = has_own_rules or rules.has_own_buffer_rules(module)
        if has_own_rules:
            self.has_own_rules.add(id(module))
        for child in child_table(module).values():
            if child is not None:
                self._walk(child, rules, seen, has_own_rules)
        for _, hidden in layers_in(vars(module), ""):
            self._walk(hidden, rules, seen)

    def is_replicated(self, tensor: Tensor | None) -> bool:
        """Whether replicas have one of their own; what is not on the root's device they share."""
        return tensor is not None and self.device in (None, tensor.device)

    def buffers(self) -> list[Tensor]:
        """The present buffers that are replicated, shared ones once, without parameters."""
        buffers = chain.from_iterable(map(dict.values, self.buffer_tables))
        found = {id(buffer): buffer for buffer in buffers if self.is_replicated(buffer)}
        for parameter in self.parameters:
            found.pop(id(parameter), None)
        return list(found.values())


def layers_in(value: Any, path: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules in lists, tuples and dicts, with the expressions that lead to them."""
    pairs: Any = ()
    if type(value) in (list, tuple):
        pairs = enumerate(value)
    elif type(value) is dict:
        pairs = value.items()
    for key, item in pairs:
        place = f"{path}[{key!r}]"
        if isinstance(item, nn.Module):
            yield place, item
        elif type(item) in (list, tuple, dict):
            yield from layers_in(item, place)


def _check_replicable(module: nn.Module) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError(
            f"Expected modules written in Python, got {type(module).__qualname__}, which "
            "torch.jit compiled and which cannot be replicated. Use the original module, or "
            "one device."
        )
    for name, parameter in parameter_table(module).items():
        if parameter is not None and nn.parameter.is_lazy(parameter):
            raise ValueError(
                f"Expected initialised parameters, got {type(module).__qualname__}.{name}, whose "
                "shape is not known yet. Run one batch through the module before training."
            )
