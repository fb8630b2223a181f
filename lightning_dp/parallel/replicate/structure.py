"""What a module is made of, and whether that has changed: compared by identity, all at once."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from operator import is_not
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dp.parallel.torch_private import (
    buffer_table,
    child_table,
    hook_tables,
    parameter_table,
)

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class ReplicaRules:
    """How special submodules are replicated; by default none is special."""

    def has_own_buffer_rules(self, module: nn.Module) -> bool:
        """Whether the buffers of a module are joined elsewhere, as those of torchmetrics' metrics.

        What torch.jit compiled in such a module is deep-copied; in other modules it is refused.
        """
        return False

    def keeps_root_tensors(self, module: nn.Module) -> bool:
        """Whether replicas use the root's tensors of this module, not copies on their device."""
        return False

    def own_attributes(
        self, module: nn.Module, twin: nn.Module, k: int, device: torch.device
    ) -> dict[str, Any]:
        """What replaces attributes of a module on replica k, where `twin` stands for it."""
        return {}


class ModuleStructure:
    """The modules, parameters and buffers of a root module, each once and in a fixed order.

    Modules that a list, tuple or dict on a module holds without registering them belong to it.
    """

    def __init__(self, root: nn.Module, rules: ReplicaRules) -> None:
        self.modules: list[nn.Module] = []
        self.scripted: list[nn.Module] = []  # compiled by torch.jit, with own buffer rules
        self.has_own_rules: set[int] = set()  # ids of modules with own buffer rules
        self.keeps_root: set[int] = set()  # ids of modules of which replicas use the root's tensors
        self.device = next((p.device for p in root.parameters()), None)
        self._walk(root, rules, set())
        parameters, self.buffer_tables = [
            [{} if id(m) in self.keeps_root else table(m) for m in self.modules]
            for table in (parameter_table, buffer_table)
        ]
        unique = {id(p): p for table in parameters for p in table.values() if p is not None}
        self.parameters: list[nn.Parameter] = list(unique.values())
        self.owners: list[Any] = [*self.modules, *self.parameters]
        self.attributes = AttributeVersions(list(map(vars, self.owners)))
        self._with_buffers = [m for m in self.modules if buffer_table(m)]
        bound = [*parameters, *map(child_table, self.modules)]
        # Buffers are compared by their names, hooks by their numbers, which are never used again.
        named: list[dict[Any, Any]] = [*self.buffer_tables]
        named += chain.from_iterable(map(hook_tables, self.modules))
        self.tables = Contents([*map(dict.values, bound), *map(dict.keys, named)])
        """Differ where a parameter, submodule, buffer name or hook came, went or was replaced."""

    def _walk(
        self,
        module: nn.Module,
        rules: ReplicaRules,
        seen: set[int],
        has_own_rules: bool = False,
        keeps_root: bool = False,
    ) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        has_own_rules = has_own_rules or rules.has_own_buffer_rules(module)
        if has_own_rules and isinstance(module, torch.jit.ScriptModule):
            self.scripted.append(module)
            return
        _check_replicable(module)
        self.modules.append(module)
        keeps_root = keeps_root or (has_own_rules and rules.keeps_root_tensors(module))
        if has_own_rules:
            self.has_own_rules.add(id(module))
        if keeps_root:
            self.keeps_root.add(id(module))
        for child in child_table(module).values():
            if child is not None:
                self._walk(child, rules, seen, has_own_rules, keeps_root)
        for _, hidden in layers_in(vars(module), ""):
            if rules.has_own_buffer_rules(hidden) or not isinstance(hidden, torch.jit.ScriptModule):
                tensors = chain(hidden.parameters(), hidden.buffers())
                elsewhere = any(tensor.device != self.device for tensor in tensors)
                self._walk(hidden, rules, seen, keeps_root=keeps_root or elsewhere)

    def present_buffers(self) -> list[Tensor]:
        """Each buffer once, though modules may share it, but for those that are parameters too."""
        buffers = chain.from_iterable(map(dict.values, self.buffer_tables))
        found = {id(buffer): buffer for buffer in buffers if buffer is not None}
        for parameter in self.parameters:
            found.pop(id(parameter), None)
        return list(found.values())

    def reads_buffers(self) -> bool:
        """Whether a forward may read a buffer. Batch norm in training only writes to its own."""
        return any([type(m) not in _BATCH_NORMS or not m.training for m in self._with_buffers])


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


class Contents:
    """The items of containers at one moment. They are compared by identity."""

    def __init__(self, containers: Sequence[Collection[Any]]) -> None:
        self._containers = containers
        self._lengths = list(map(len, containers))
        self._filled = list(filter(len, containers))
        self._items = list(chain.from_iterable(self._filled))

    def differ(self) -> bool:
        """Whether the containers have other items now."""
        if list(map(len, self._containers)) != self._lengths:
            return True
        return any(map(is_not, chain.from_iterable(self._filled), self._items))


class AttributeVersions:
    """A number for each owner of attributes, which grows when one is bound anew, comes or goes."""

    def __init__(self, owners: Sequence[dict[str, Any]]) -> None:
        self._values = list(map(dict.values, owners))
        self.versions = [0] * len(owners)
        self._note()

    def _note(self) -> None:
        self._contents = Contents(self._values)
        self._seen = list(map(tuple, self._values))

    def look(self) -> list[int]:
        """Compares with the last look; returns the versions."""
        if self._contents.differ():
            for j, (now, seen) in enumerate(zip(self._values, self._seen, strict=True)):
                self.versions[j] += len(now) != len(seen) or any(map(is_not, now, seen))
            self._note()
        return self.versions
