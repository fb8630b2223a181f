"""Layout: what a module is made of, and what of it may have changed."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn


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


class Layout:
    """The submodules, parameters and buffer tables of a module, each once and in a fixed order."""

    def __init__(self, root: nn.Module, rules: ReplicaRules) -> None:
        self.root = root
        self.modules: list[nn.Module] = []
        self.leaves: list[nn.Module] = []
        self._walk(root, rules, set())
        unique = {id(p): p for m in self.modules for p in m._parameters.values() if p is not None}
        self.parameters: list[nn.Parameter] = list(unique.values())
        self.buffer_tables = [m._buffers for m in self.modules]

    def _walk(self, module: nn.Module, rules: ReplicaRules, seen: set[int]) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        _check_replicable(module)
        if rules.is_leaf(module):
            self.leaves.append(module)
            return
        self.modules.append(module)
        for child in module._modules.values():
            if child is not None:
                self._walk(child, rules, seen)

    def signature(self) -> list[int]:
        """Changes when a parameter, submodule or buffer name is added, removed or replaced."""
        parameters = [id(p) for m in self.modules for p in m._parameters.values()]
        children = [id(child) for m in self.modules for child in m._modules.values()]
        return [*parameters, *children, *map(len, self.buffer_tables)]

    def buffers(self) -> list[Tensor | None]:
        """The present buffers, with None where a registered one is absent."""
        return entries(self.buffer_tables)


class RootState:
    """What of the root may have changed since a replica looked: identities and versions."""

    def __init__(self, layout: Layout) -> None:
        parameters, self.buffers = layout.parameters, layout.buffers()
        self.pointers = [p.data_ptr() for p in parameters]
        self.versions = [p._version for p in parameters]
        self.requires_grad = [p.requires_grad for p in parameters]
        self.buffer_ids = [id(b) for b in self.buffers]
        self.buffer_versions = [_version(b) for b in self.buffers]


def entries(tables: list[dict[str, Tensor | None]]) -> list[Tensor | None]:
    """All buffers of some modules' tables, in order."""
    return [buffer for table in tables for buffer in table.values()]


def _version(buffer: Tensor | None) -> float:
    """Equal to what it was as long as the buffer is unchanged.

    Inference tensors do not count their changes; NaN is never equal to itself.
    """
    if buffer is None:
        return -1
    return math.nan if buffer.is_inference() else buffer._version


def _check_replicable(module: nn.Module) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError(
            f"Expected modules written in Python, got {type(module).__qualname__}, which "
            "torch.jit compiled and which cannot be replicated. Use the original module, or "
            "one device."
        )
    for name, parameter in module._parameters.items():
        if parameter is not None and nn.parameter.is_lazy(parameter):
            raise ValueError(
                f"Expected initialised parameters, got {type(module).__qualname__}.{name}, whose "
                "shape is not known yet. Run one batch through the module before training."
            )
