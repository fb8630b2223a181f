"""The plain attributes of one submodule of a replica: how they follow the root's."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from functools import partial
from operator import is_not
from types import CellType, FunctionType, MemberDescriptorType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dp.parallel.replicas.buffers import Table, version_of
from lightning_dp.parallel.torch_private import (
    child_table,
    copy_hook_tables,
    parameter_table,
    tables_as_attributes,
)

_ABSENT = object()


class AttributeMirror:
    """The attributes of one submodule of a replica.

    What stands for the root's parts is in `twins`, by their ids. In the place of some of the
    replica's parameters it computes with others for a while: these are in `others`, by the ids of
    the replica's. Both are the replica's own, for all its submodules.
    """

    def __init__(
        self,
        original: nn.Module,
        twins: dict[int, Any],
        others: dict[int, Tensor],
        buffers: Table,
        own: dict[str, Any],
        source: torch.device,
        device: torch.device,
    ) -> None:
        self._original = original.__dict__
        self._attributes = twins[id(original)].__dict__
        self._twins, self._others = twins, others
        self._source, self._device = source, device
        self._parameters = _translate(dict(parameter_table(original)), twins)
        children = _translate(dict(child_table(original)), twins)
        self._own = {**tables_as_attributes(self._parameters, buffers, children), **own}
        self._seen: dict[str, Any] = {}
        self._translated: dict[str, Any] = {}
        self._slots = [(name, original, twins[id(original)]) for name in _slots_of(original)]
        self._kept: dict[str, tuple[Any, Any]] = {}
        self._copies: list[tuple[Tensor, float]] = []
        self._size = -1
        self.version = -1
        self.refresh()

    def refresh(self) -> None:
        """Follows the original's plain attributes; references to its parts become ours."""
        attributes = self._attributes
        attributes.update(self._original)
        copy_hook_tables(attributes)  # a step may add hooks, for its replica's calls alone
        self._look_for_parts()
        attributes.update(_translate(self._translated, self._others))
        for name, original, twin in self._slots:
            if hasattr(original, name):
                value = _translate(getattr(original, name), self._twins)
                object.__setattr__(twin, name, value)  # which registers nothing
        for name, (value, kept) in list(self._kept.items()):
            if self._original.get(name) is value:
                attributes[name] = kept
            else:
                del self._kept[name]
        self._copy_tensors()
        attributes.update(self._own)
        self._drop_strays()

    def _look_for_parts(self) -> None:
        """Translates what has been bound anew and refers to parts of the root."""
        for name, value in self._original.items():
            if self._seen.get(name, _ABSENT) is not value and name not in self._own:
                twin = _translate(value, self._twins)
                self._translated.pop(name, None)
                if twin is not value:
                    self._translated[name] = twin
        for name in self._translated.keys() - self._original.keys():
            del self._translated[name]
        # A tensor is looked at again: whoever held it would hold its graph.
        self._seen = {n: v for n, v in self._original.items() if not isinstance(v, Tensor)}

    def own(self, attributes: dict[str, Any]) -> None:
        """Has these attributes for good, whatever the original's are."""
        self._own.update(attributes)
        self._attributes.update(attributes)

    def keep(self, name: str) -> None:
        """Keeps an attribute until the original's is bound anew."""
        self._kept[name] = (self._original.get(name), self._attributes[name])

    def replace(self, others: dict[int, Any]) -> None:
        """Puts other tensors in the place of those that it has, whatever the original has now."""
        self._parameters.update(_translate(dict(self._parameters), others))
        for name in self._translated:
            if name in self._attributes:
                self._attributes[name] = _translate(self._attributes[name], others)

    @property
    def has_to_be_watched(self) -> bool:
        """Whether it may become stale though nobody binds, sets or removes an attribute."""
        return bool(self._slots or self._copies)

    def is_stale(self) -> bool:
        """Whether a step set or removed attributes, or a tensor was written to that we copied."""
        return (
            len(self._attributes) != self._size
            or bool(self._slots)  # nobody counts how often these are bound
            or (
                bool(self._copies)
                and any(version_of(value) != seen for value, seen in self._copies)
            )
        )

    def _copy_tensors(self) -> None:
        """Tensors that are neither parameters nor buffers have to be where their replica is.

        Those on the CPU stay there, as they do where a module is moved. Those with a graph stay
        too, since a copy would cut it.
        """
        self._copies = []
        if self._device == self._source or self._source.type == "cpu":
            return
        for name, value in self._attributes.items():
            is_there = isinstance(value, Tensor) and value.device == self._source
            if is_there and not value.requires_grad and name not in self._own:
                self._attributes[name] = value.to(self._device)
                self._copies.append((value, version_of(value)))

    def _drop_strays(self) -> None:
        for name in self._attributes.keys() - self._original.keys() - self._own.keys():
            del self._attributes[name]
        self._size = len(self._attributes)


def _slots_of(module: nn.Module) -> list[str]:
    """The attributes that its classes keep in `__slots__`, beside its `__dict__`."""
    members = [vars(cls).items() for cls in type(module).__mro__]
    return [n for items in members for n, m in items if isinstance(m, MemberDescriptorType)]


def _translate(value: Any, twins: dict[int, Any]) -> Any:
    """`value` with the root's parameters and modules in it replaced by a replica's.

    Recurrent layers keep a flat list of their weights, users keep lists of layers, bound methods
    and functions made beside them (a hook that appends to `self.seen`); a replica that followed
    such a reference would compute with the root's weights.
    """
    if isinstance(value, Tensor | nn.Module):
        return twins.get(id(value), value)
    if isinstance(value, MethodType) and id(value.__self__) in twins:
        return MethodType(value.__func__, twins[id(value.__self__)])
    if isinstance(value, FunctionType) and value.__closure__:
        return _with_other_cells(value, twins)
    if isinstance(value, weakref.ref) and id(value()) in twins:
        return weakref.ref(twins[id(value())])
    if type(value) in (dict, OrderedDict):  # a module's hooks are in ordered ones
        items = {key: _translate(entry, twins) for key, entry in value.items()}
        changed = any(items[key] is not value[key] for key in items)
        return type(value)(items) if changed else value
    if isinstance(value, partial):
        parts = (value.func, value.args, value.keywords)
        function, args, kwargs = own = _translate(parts, twins)
        return value if own is parts else partial(function, *args, **kwargs)
    if type(value) in (list, tuple):
        entries = [_translate(entry, twins) for entry in value]
        return type(value)(entries) if any(map(is_not, entries, value)) else value
    return value


def _with_other_cells(function: FunctionType, twins: dict[int, Any]) -> FunctionType:
    """A function that knows a replica's parts where the original knows the root's.

    All else that it knows it shares with the original: counters go on counting.
    """
    cells = tuple(_other_cell(cell, twins) for cell in function.__closure__ or ())
    if not any(map(is_not, cells, function.__closure__ or ())):
        return function
    defaults = function.__defaults__
    twin = FunctionType(function.__code__, function.__globals__, function.__name__, defaults, cells)
    twin.__kwdefaults__ = function.__kwdefaults__
    twin.__dict__.update(function.__dict__)
    return twin


def _other_cell(cell: CellType, twins: dict[int, Any]) -> CellType:
    try:
        content = cell.cell_contents
    except ValueError:  # it is empty
        return cell
    # No further than to the parts and their methods: functions may know each other in circles.
    known = content.__self__ if isinstance(content, MethodType) else content
    return CellType(_translate(content, twins)) if id(known) in twins else cell
