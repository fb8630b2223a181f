"""The plain attributes of one submodule of a replica: how they follow the root's."""

from __future__ import annotations

import weakref
from collections import ChainMap, OrderedDict
from collections.abc import Mapping
from functools import partial
from operator import is_not
from types import CellType, FunctionType, MemberDescriptorType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dp.parallel.replicas.buffers import Table, version_of
from lightning_dp.parallel.replicas.compiled import is_compiled
from lightning_dp.parallel.replicas.generators import OwnGenerators
from lightning_dp.parallel.torch_private import (
    HOOK_TABLES,
    child_table,
    compiled_function,
    copy_hook_tables,
    parameter_table,
    tables_as_attributes,
    with_cells,
)

_ABSENT = object()


class AttributeMirror:
    """The attributes of one submodule of a replica.

    What stands for the root's parts is in `twins`, by their ids; what else does in what hooks know,
    is `in_hooks`. In the place of some of the replica's parameters it computes with others for a
    while: these are in `others`, by the ids of the replica's. All are the replica's own, for all
    its submodules.
    """

    def __init__(
        self,
        original: nn.Module,
        twins: dict[int, Any],
        in_hooks: dict[int, Any],
        others: dict[int, Tensor],
        buffers: Table,
        own: dict[str, Any],
        source: torch.device,
        device: torch.device,
        generators: OwnGenerators,
    ) -> None:
        self._generators = generators
        self._original = original.__dict__
        self._twin = twins[id(original)]
        self._attributes = self._twin.__dict__
        self._twins, self._others = twins, others
        self._in_hooks = ChainMap(twins, in_hooks)
        self._source, self._device = source, device
        self._parameters = _translate(dict(parameter_table(original)), twins)
        children = _translate(dict(child_table(original)), twins)
        self._own = {**tables_as_attributes(self._parameters, buffers, children), **own}
        self._seen: dict[str, Any] = {}
        self._translated: dict[str, Any] = {}
        self._slots = [(name, original, twins[id(original)]) for name in _slots_of(original)]
        self._kept: dict[str, tuple[Any, Any]] = {}
        self._copies: list[tuple[Tensor, float]] = []
        self.in_graphs: list[str] = []  # attributes that are tensors with a graph, elsewhere
        self.compiles = False  # an attribute is a compiled function
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
                self.compiles = self.compiles or is_compiled(value)
                twins = self._in_hooks if name in HOOK_TABLES else self._twins
                twin = _translate(value, twins)
                self._translated.pop(name, None)
                if twin is not value:
                    self._translated[name] = twin
        for name in self._translated.keys() - self._original.keys():
            del self._translated[name]
        # A tensor is looked at again: whoever held it would hold its graph.
        self._seen = {n: v for n, v in self._original.items() if not isinstance(v, Tensor)}

    def translate_hooks(self) -> None:
        """Translates its hooks again: more than before stands for something that they know."""
        for name in HOOK_TABLES:
            self._seen.pop(name, None)
        self._look_for_parts()
        hooks = {name: self._translated[name] for name in HOOK_TABLES if name in self._translated}
        self._attributes.update(_translate(hooks, self._others))

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

    def connect(self) -> None:
        """Has copies of the tensors with a graph, which lead back to these."""
        for name in self.in_graphs:
            # As the module's own code sets them: recurrent layers note their weights then.
            setattr(self._twin, name, self._original[name].to(self._device))

    def disconnect(self) -> None:
        """Has no such copies any more."""
        for name in self.in_graphs:
            setattr(self._twin, name, self._original[name])

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
        """Generators, and tensors that are neither parameters nor buffers, are where it is.

        Those on the CPU stay there, as they do where a module is moved. Those with a graph stay
        too, until `connect` copies them: a copy that is made here would cut it.
        """
        self._copies, self.in_graphs = [], []
        if self._device == self._source or self._source.type == "cpu":
            return
        for name, value in self._attributes.items():
            is_there = isinstance(value, Tensor) and value.device == self._source
            if name in self._own:
                continue
            if isinstance(value, torch.Generator):
                self._attributes[name] = self._generators.of(value)
            elif is_there and value.requires_grad:
                self.in_graphs.append(name)
            elif is_there:
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


def _translate(value: Any, twins: Mapping[int, Any]) -> Any:
    """`value` with the root's parameters and modules in it replaced by a replica's.

    Recurrent layers keep a flat list of their weights, users keep lists of layers, bound methods
    and functions made beside them (a hook that appends to `self.seen`); a replica that followed
    such a reference would compute with the root's weights.
    """
    if isinstance(value, Tensor | nn.Module) or id(value) in twins:
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


def _with_other_cells(
    function: FunctionType, twins: Mapping[int, Any], depth: int = 0
) -> FunctionType:
    """A function that knows a replica's parts where the original knows the root's.

    All else that it knows it shares with the original: counters go on counting. Only of containers
    that a hook knows and `self` has, a replica's hook knows the replica's own. What a compiled
    function calls is looked into, too: that may be wrapped once more.
    """
    original = compiled_function(function)
    depth = depth if original is None else 2
    cells = tuple(_other_cell(cell, twins, depth) for cell in function.__closure__ or ())
    if not any(map(is_not, cells, function.__closure__ or ())):
        return function
    own = None if original is None else _other_content(original, twins, depth)
    return with_cells(function, cells, own)


def _other_cell(cell: CellType, twins: Mapping[int, Any], depth: int) -> CellType:
    try:
        content = cell.cell_contents
    except ValueError:  # it is empty
        return cell
    other = _other_content(content, twins, depth)
    return cell if other is content else CellType(other)


def _other_content(content: Any, twins: Mapping[int, Any], depth: int) -> Any:
    """No further than to the parts themselves: functions may know each other in circles."""
    if isinstance(content, MethodType) and id(content.__self__) in twins:
        return MethodType(content.__func__, twins[id(content.__self__)])
    if depth and isinstance(content, FunctionType) and content.__closure__:
        return _with_other_cells(content, twins, depth - 1)
    return twins.get(id(content), content)
