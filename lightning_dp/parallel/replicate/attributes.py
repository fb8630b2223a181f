"""Copies a module's attributes for a replica, by identity as `copy.deepcopy` does.

A memo keyed by id() makes an object that occurs twice one copy. It begins with the replica's
modules, parameters and buffers. Lists, dicts and deques are always copied, since what steps append
is joined; a tuple, a set, a plain object, a function or a bound method only if it reaches a part of
the module. Everything else is shared: arrays, data sets, loggers, optimizers, locks, files, the
trainer. A tensor is shared, or copied to the replica's device.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache, partial
from operator import is_not
from types import (
    CellType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor, nn

from lightning_dp.parallel.torch_private import compiled_function, with_cells

ATOMS = frozenset(
    {bool, bytes, complex, float, int, str, type, type(None), ModuleType}
    | {torch.device, torch.dtype, torch.Size}
)
"""Types of values that replicas share and that lead to nothing else."""

_SHARED_PACKAGES = {
    *(sys.stdlib_module_names - {"abc", "builtins", "collections", "types", "typing"}),
    *("torch", "numpy", "lightning", "lightning_fabric", "pytorch_lightning", "lightning_dp"),
}
"""An instance of a class of these packages, or of a subclass of it, is shared as it is."""


class Copier:
    """Copies attributes for one replica, all with one memo.

    Args:
        parts: the replica's modules, parameters and buffers, by the ids of the root's.
        source: the root's device.
        device: the replica's.

    Attributes:
        containers: the containers that were copied, and their copies.
        moved: the tensors that were copied to the replica's device.
        has_graphs: whether a tensor requires gradients.
        holds_tensors: whether a copy refers to parameters or buffers.
        compiles: whether a compiled function was found.
        runs_in_order: whether a `threading.local` or a `torch.Generator` was found.
    """

    def __init__(
        self,
        parts: Mapping[int, Any],
        source: torch.device,
        device: torch.device,
    ) -> None:
        self._memo = dict(parts)
        self._source, self._device = source, device
        self._outside: set[int] = set()  # ids of what reaches no part of the module
        self.containers: list[Collection[Any]] = []
        self.moved: list[Tensor] = []
        self.has_graphs = self.holds_tensors = self.compiles = self.runs_in_order = False

    def tensor(self, value: Tensor) -> Any:
        """What the replica has in the place of a tensor that is an attribute.

        From the root's device it is copied to the replica's; on the CPU it stays there. In a spread
        call with gradients it keeps its graph, through which the backward reaches it.
        """
        if id(value) in self._memo:
            return self.copy(value)
        twin = value
        if value.requires_grad:
            self.has_graphs = True
            if torch.is_grad_enabled():
                twin = value.to(self._device)
            elif value.grad_fn is not None:
                twin = value.detach()
        if self._source.type != "cpu" and twin.device == self._source and not twin.requires_grad:
            twin = twin.to(self._device)
        if twin.device != value.device:
            self.moved.append(value)
        self._memo[id(value)] = twin
        return twin

    def copy(self, value: Any) -> Any:
        """What the replica has in the place of a value."""
        kind = type(value)
        if kind in ATOMS:
            return value
        if id(value) in self._memo:
            self.holds_tensors |= isinstance(value, Tensor)
            return self._memo[id(value)]
        if isinstance(value, Tensor | nn.Module | type):
            return value  # tensors that steps have collected stay where they are
        if isinstance(value, dict) or kind in (list, deque):
            return self._container(value)
        if isinstance(value, tuple):
            return self._tuple(value)
        if kind is ref:
            target = value()
            return ref(self.copy(target)) if id(target) in self._memo else value
        self.compiles |= compiled_function(getattr(value, "__func__", value)) is not None
        if not self._reaches(value):
            return value
        if kind is MethodType:
            return MethodType(self.copy(value.__func__), self.copy(value.__self__))
        if kind is partial:
            return partial(
                self.copy(value.func), *self.copy(value.args), **self.copy(value.keywords)
            )
        if kind is set:
            return self._memo.setdefault(id(value), set(map(self.copy, value)))
        return self._function(value) if kind is FunctionType else self._object(value)

    def _container(self, value: Any) -> Any:
        twin = copy.copy(value)  # which keeps a class, a default factory or a longest length
        twin.clear()
        self._memo[id(value)] = twin
        if isinstance(value, dict):
            for key, item in value.items():
                twin[self.copy(key)] = self.copy(item)
            self.containers += [value.keys(), value.values(), twin.keys(), twin.values()]
        else:
            twin.extend(map(self.copy, value))
            self.containers += [value, twin]
        return twin

    def _tuple(self, value: Any) -> Any:
        items = list(map(self.copy, value))
        if not any(map(is_not, items, value)):
            return value
        make = getattr(type(value), "_make", type(value))  # a namedtuple takes its items one by one
        return self._memo.setdefault(id(value), make(items))

    def _function(self, value: FunctionType) -> Any:
        """A function whose cells hold the replica's parts; all other cells it shares."""
        cells = list(map(self._cell, value.__closure__ or ()))
        original = compiled_function(value)
        twin = with_cells(value, cells, None if original is None else self.copy(original))
        return self._memo.setdefault(id(value), twin)  # a cell of its own may have copied it

    def _cell(self, cell: CellType) -> CellType:
        """A cell of several functions is one cell of their copies."""
        if id(cell) not in self._memo:
            if not self._reaches(_content(cell)):
                return cell
            twin = self._memo[id(cell)] = CellType()
            twin.cell_contents = self.copy(cell.cell_contents)
        return cast(CellType, self._memo[id(cell)])

    def _object(self, value: Any) -> Any:
        cls: Any = type(value)
        try:
            twin = SimpleNamespace() if cls is SimpleNamespace else object.__new__(cls)
        except TypeError:  # a class of an extension, which alone knows how to make one
            return value
        self._memo[id(value)] = twin
        if hasattr(value, "__dict__"):
            vars(twin).update({name: self.copy(item) for name, item in vars(value).items()})
            self.containers += [vars(value).keys(), vars(value).values(), vars(twin).values()]
        for name in _slots(value):
            object.__setattr__(twin, name, self.copy(getattr(value, name)))
        return twin

    def _reaches(self, value: Any) -> bool:
        """Whether a value leads to a part of the module, or to something that was copied."""
        seen: set[int] = set()
        waiting = [value]
        while waiting:
            item = waiting.pop()
            if type(item) in ATOMS or id(item) in seen or id(item) in self._outside:
                continue
            if id(item) in self._memo:
                return True
            seen.add(id(item))
            self.runs_in_order |= isinstance(item, threading.local | torch.Generator)
            waiting.extend(_within(item))
        self._outside |= seen
        return False


def _within(value: Any) -> Iterable[Any]:
    """What a value refers to, as far as the copier follows references."""
    kind = type(value)
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, list | tuple | set | deque):
        return value
    if kind is MethodType:
        return [value.__self__, value.__func__]
    if kind is FunctionType:
        return [*map(_content, value.__closure__ or ()), compiled_function(value)]
    if kind is partial:
        return [value.func, value.args, value.keywords]
    if isinstance(value, Tensor | nn.Module | type) or _is_shared(cast(Any, kind)):
        return ()
    return [*getattr(value, "__dict__", {}).values(), *(getattr(value, n) for n in _slots(value))]


@lru_cache(1024)
def _is_shared(cls: Any) -> bool:
    """Whether an object of this class is shared whatever it refers to."""
    packages = {base.__module__.partition(".")[0] for base in cls.__mro__}
    return not packages.isdisjoint(_SHARED_PACKAGES)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the cell is empty
        return None


def _slots(value: Any) -> list[str]:
    """The attributes that a value has in `__slots__` of its classes."""
    members = [item for cls in type(value).__mro__ for item in vars(cls).items()]
    names = [name for name, member in members if isinstance(member, MemberDescriptorType)]
    return [n for n in names if n not in ("__dict__", "__weakref__") and hasattr(value, n)]
