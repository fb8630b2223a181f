"""ModuleStructure: what a module is made of, and what of it may have changed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_dp.parallel.replicas.changes import AttributeVersions, ModuleTables
from lightning_dp.parallel.replicas.hidden_layers import layers_in
from lightning_dp.parallel.torch_private import buffer_table, child_table, parameter_table

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class ReplicaRules:
    """What is special about some modules when they are replicated; by default nothing is."""

    def is_apart(self, module: nn.Module) -> bool:
        """Whether a module is replicated with all that is in it, wherever it is kept.

        Also where a plain container keeps it; and what torch.jit compiled in it is copied, which
        would be refused elsewhere.
        """
        return False

    def stays(self, module: nn.Module) -> bool:
        """Whether such a module's own tensors are not on the root's device, and stay there."""
        return False

    def own_names(self, module: nn.Module) -> frozenset[str]:
        """Attributes that every replica of a module keeps for itself, whatever the root's are."""
        return frozenset()

    def own_attributes(
        self, module: nn.Module, twin: nn.Module, k: int, device: torch.device
    ) -> dict[str, Any]:
        """Attributes that a module's twin on replica k keeps for itself, and does not follow."""
        return {}


class ModuleStructure:
    """The submodules, parameters and buffer tables of a module, each once and in a fixed order."""

    def __init__(self, root: nn.Module, rules: ReplicaRules) -> None:
        self.root = root
        self.modules: list[nn.Module] = []
        self.compiled: list[nn.Module] = []  # by torch.jit, see `ReplicaRules.is_apart`
        self.apart: set[int] = set()  # the ids of those modules, and of all in them
        self.staying: set[int] = set()  # the ids of modules whose tensors replicas refer to
        self._walk(root, rules, set())
        parameter_tables = [
            {} if id(m) in self.staying else parameter_table(m) for m in self.modules
        ]
        unique = {id(p): p for table in parameter_tables for p in table.values() if p is not None}
        self.parameters: list[nn.Parameter] = list(unique.values())
        self.buffer_tables = [
            {} if id(m) in self.staying else buffer_table(m) for m in self.modules
        ]
        self.with_buffers = [m for m in self.modules if buffer_table(m)]
        own_names = map(rules.own_names, self.modules)
        self.attributes = AttributeVersions([m.__dict__ for m in self.modules], list(own_names))
        self.tables = ModuleTables(self.modules, parameter_tables, self.buffer_tables)

    def _walk(
        self,
        module: nn.Module,
        rules: ReplicaRules,
        seen: set[int],
        is_apart: bool = False,
        stays: bool = False,
    ) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        if is_apart and isinstance(module, torch.jit.ScriptModule):
            self.compiled.append(module)
            return
        _check_replicable(module)
        self.modules.append(module)
        is_apart = is_apart or rules.is_apart(module)
        stays = stays or (is_apart and rules.stays(module))
        if is_apart:
            self.apart.add(id(module))
        if stays:
            self.staying.add(id(module))
        for child in child_table(module).values():
            if child is not None:
                self._walk(child, rules, seen, is_apart, stays)
        for name, value in module.__dict__.items():
            for _, hidden in layers_in(value, name):
                if rules.is_apart(hidden):
                    self._walk(hidden, rules, seen, stays=stays)

    def reads_buffers(self) -> bool:
        """Whether a forward may read a buffer. Batch norm in training writes to its own only."""
        return any(type(m) not in _NORMS or not m.training for m in self.with_buffers)

    def read_buffers(self) -> list[Tensor | None]:
        """Those that a forward may read."""
        readers = [m for m in self.with_buffers if type(m) not in _NORMS or not m.training]
        return [buffer for module in readers for buffer in buffer_table(module).values()]


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
