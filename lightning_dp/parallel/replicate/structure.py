"""What a module is made of, and whether that has changed: compared by identity, all at once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from itertools import chain
from operator import is_not, itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dp.parallel.torch_private import (
    FIXED_NAMES,
    buffer_table,
    child_table,
    hook_tables,
    parameter_table,
)

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class ReplicaRules:
    """How special submodules are replicated; by default none is special."""

    def is_apart(self, module: nn.Module) -> bool:
        """Whether the buffers of a module and its submodules follow rules of their own.

        What torch.jit compiled in such a module is deep-copied; elsewhere it is refused.
        """
        return False

    def stays(self, module: nn.Module) -> bool:
        """Whether replicas use the tensors of such a module where they are."""
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
        self.root = root
        self.modules: list[nn.Module] = []
        self.scripted: list[nn.Module] = []  # compiled by torch.jit, and apart
        self.apart: set[int] = set()  # ids of modules, see `ReplicaRules.is_apart`
        self.staying: set[int] = set()  # ids of modules, see `ReplicaRules.stays`
        self._device = next((p.device for p in root.parameters()), None)
        self._walk(root, rules, set())
        parameters, buffers = [
            [{} if id(m) in self.staying else table(m) for m in self.modules]
            for table in (parameter_table, buffer_table)
        ]
        unique = {id(p): p for table in parameters for p in table.values() if p is not None}
        self.parameters: list[nn.Parameter] = list(unique.values())
        self.buffer_tables = buffers
        self._with_buffers = [m for m in self.modules if buffer_table(m)]
        self.owners: list[Any] = [*self.modules, *(p for p in self.parameters if vars(p))]
        self.attributes = AttributeVersions(list(map(vars, self.owners)))
        bound = [*parameters, *map(child_table, self.modules)]
        # Buffers are compared by their names, hooks by their numbers, which are never used again.
        named: list[dict[Any, Any]] = [
            *buffers,
            *chain.from_iterable(map(hook_tables, self.modules)),
        ]
        named += [vars(p) for p in self.parameters if not vars(p)]
        self._tables = Contents(
            [*(table.values() for table in bound), *(table.keys() for table in named)]
        )

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
        is_apart = is_apart or rules.is_apart(module)
        if is_apart and isinstance(module, torch.jit.ScriptModule):
            self.scripted.append(module)
            return
        _check_replicable(module)
        self.modules.append(module)
        stays = stays or (is_apart and rules.stays(module))
        for ids in [self.apart] * is_apart + [self.staying] * stays:
            ids.add(id(module))
        for child in child_table(module).values():
            if child is not None:
                self._walk(child, rules, seen, is_apart, stays)
        for _, hidden in layers_in(vars(module), ""):
            if rules.is_apart(hidden) or not isinstance(hidden, torch.jit.ScriptModule):
                tensors = chain(hidden.parameters(), hidden.buffers())
                elsewhere = any(tensor.device != self._device for tensor in tensors)
                self._walk(hidden, rules, seen, stays=stays or elsewhere)

    def has_changed(self) -> bool:
        """Whether a parameter, submodule, buffer name or hook came, went or was replaced."""
        return self._tables.differ()

    def reads_buffers(self) -> bool:
        """Whether a forward may read a buffer. Batch norm in training only writes to its own."""
        return any(type(m) not in _BATCH_NORMS or not m.training for m in self._with_buffers)

    def read_buffers(self) -> list[Tensor | None]:
        """The buffers that a forward may read."""
        readers = [m for m in self._with_buffers if type(m) not in _BATCH_NORMS or not m.training]
        return [buffer for module in readers for buffer in buffer_table(module).values()]


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


class AttributeVersions:
    """A number for each owner of attributes, which grows when one is bound anew, comes or goes."""

    def __init__(self, owners: list[dict[str, Any]]) -> None:
        self._owners = owners
        self.versions = [0] * len(owners)
        self._names: list[set[str]] = [set() for _ in owners]
        self._seen: list[tuple[Any, ...]] = [()] * len(owners)
        self._getters: list[Callable[[Any], tuple[Any, ...]]] = [tuple] * len(owners)
        self._learn_names()

    def look(self) -> list[int]:
        """Compares with the last look; returns the versions."""
        try:
            values = [get(own) for get, own in zip(self._getters, self._owners, strict=True)]
        except KeyError:  # an attribute was deleted
            values = []
        if not values or list(map(len, self._owners)) != self._sizes:
            self._learn_names()
        elif any(map(is_not, chain.from_iterable(values), self._flat)):
            self._compare(values)
        return self.versions

    def _compare(self, values: list[tuple[Any, ...]]) -> None:
        for j, pair in enumerate(zip(values, self._seen, strict=True)):
            self.versions[j] += len(pair[0]) != len(pair[1]) or any(map(is_not, *pair))
        self._seen = values
        self._flat = list(chain.from_iterable(values))

    def _learn_names(self) -> None:
        self._sizes = list(map(len, self._owners))
        for j, own in enumerate(self._owners):
            names = own.keys() - FIXED_NAMES
            if names != self._names[j]:
                self._names[j], self._seen[j] = names, ()
                # With a name twice, itemgetter returns a tuple also of a single attribute.
                self._getters[j] = itemgetter(*names, next(iter(names))) if names else tuple
        self._compare([get(own) for get, own in zip(self._getters, self._owners, strict=True)])


class Contents:
    """The items of containers, as they were."""

    def __init__(self, live: list[Collection[Any]]) -> None:
        self._live = live
        self._lengths = list(map(len, live))
        self._filled = list(filter(len, live))
        self._items = list(chain.from_iterable(self._filled))

    def differ(self) -> bool:
        """Whether the containers have other items now."""
        items = chain.from_iterable(self._filled)
        return list(map(len, self._live)) != self._lengths or any(map(is_not, items, self._items))
