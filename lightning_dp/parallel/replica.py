"""One replica: the module as it stands on one device besides the root."""

from __future__ import annotations

import weakref
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dp.parallel.layout import Layout, ReplicaRules, RootState, entries
from lightning_dp.parallel.transfer import copy_coalesced


class Replica:
    """The module as it stands on one device other than the first entry."""

    def __init__(self, source: Layout, k: int, device: torch.device, rules: ReplicaRules) -> None:
        self._source = source
        self._seen = RootState(source)
        self._device = device
        self._shares_memory = all(p.device == device for p in source.parameters)
        self.parameters = [_leaf_parameter(p, device) for p in source.parameters]
        self.buffer_tables = [_copied(table, device) for table in source.buffer_tables]
        twins = self._make_twins(k, device, rules)
        self._bodies = [
            _Body(module, twins, buffers, rules.own_attributes(module, k, device))
            for module, buffers in zip(source.modules, self.buffer_tables, strict=True)
        ]
        self.module: nn.Module = twins[id(source.root)]
        self.submodules: list[nn.Module] = [twins[id(m)] for m in source.modules]

    def refresh(self, state: RootState, everything: bool, all_buffers: bool) -> None:
        """Follows the root, whose state is `state`; the flags say what to copy unseen."""
        for body in self._bodies:
            body.refresh()
        self._refresh_parameters(state, everything)
        self._refresh_buffers(state, all_buffers)
        self._seen = state

    def _make_twins(self, k: int, device: torch.device, rules: ReplicaRules) -> dict[int, Any]:
        """What stands for each parameter and module of the root, by the original's id."""
        source = self._source
        pairs = zip(source.parameters, self.parameters, strict=True)
        twins: dict[int, Any] = {id(original): twin for original, twin in pairs}
        twins.update({id(m): object.__new__(type(m)) for m in source.modules})
        twins.update({id(m): rules.copy_leaf(m, k, device) for m in source.leaves})
        return twins

    def _refresh_parameters(self, state: RootState, everything: bool) -> None:
        roots, seen = self._source.parameters, self._seen
        if state.requires_grad != seen.requires_grad:
            for root, twin in zip(roots, self.parameters, strict=True):
                twin.requires_grad_(root.requires_grad)
        moved = state.pointers != seen.pointers
        written = everything or state.versions != seen.versions
        if moved or (written and not self._shares_memory):
            stale = [
                i
                for i in range(len(roots))
                if everything
                or state.pointers[i] != seen.pointers[i]
                or state.versions[i] != seen.versions[i]
            ]
            _update([roots[i] for i in stale], [self.parameters[i] for i in stale])

    def _refresh_buffers(self, state: RootState, all_buffers: bool) -> None:
        pairs = zip(state.buffer_versions, self._seen.buffer_versions, strict=True)
        stale = [i for i, (now, then) in enumerate(pairs) if all_buffers or now != then]
        twins = entries(self.buffer_tables) if stale else []
        sources = [b for i in stale if (b := state.buffers[i]) is not None]
        targets = [b for i in stale if (b := twins[i]) is not None]
        # A forward may itself have given a replica a buffer that the root does not have.
        if state.buffer_ids != self._seen.buffer_ids or len(sources) != len(targets):
            self._replace_buffers()
        else:
            copy_coalesced(sources, targets)

    def _replace_buffers(self) -> None:
        """The root has other buffer objects than before, perhaps of other shapes."""
        for original, own in zip(self._source.buffer_tables, self.buffer_tables, strict=True):
            own.clear()
            own.update(_copied(original, self._device))


class _Body:
    """The attributes of one submodule of a replica."""

    def __init__(
        self,
        original: nn.Module,
        twins: dict[int, Any],
        buffers: dict[str, Tensor | None],
        own: dict[str, Any],
    ) -> None:
        self._original = original.__dict__
        self._attributes = twins[id(original)].__dict__
        self._twins = twins
        self._own = {
            "_parameters": _translate(dict(original._parameters), twins),
            "_modules": _translate(dict(original._modules), twins),
            "_buffers": buffers,
            **own,
        }
        self._translated = {
            name: (value, twin)
            for name, value in original.__dict__.items()
            if name not in self._own and (twin := _translate(value, twins)) is not value
        }
        self.refresh()

    def refresh(self) -> None:
        """Follows the original's plain attributes; references to its parts become ours."""
        attributes = self._attributes
        attributes.clear()
        attributes.update(self._original)
        for name, (value, twin) in self._translated.items():
            current = attributes.get(name)
            attributes[name] = twin if current is value else _translate(current, self._twins)
        attributes.update(self._own)


def _translate(value: Any, twins: dict[int, Any]) -> Any:
    """`value` with the root's parameters and modules in it replaced by a replica's.

    Recurrent layers keep a flat list of their weights, users keep lists of layers and bound
    methods; a replica that followed such a reference would compute with the root's weights.
    """
    if isinstance(value, Tensor | nn.Module):
        return twins.get(id(value), value)
    if isinstance(value, MethodType) and id(value.__self__) in twins:
        return MethodType(value.__func__, twins[id(value.__self__)])
    if isinstance(value, weakref.ref) and id(value()) in twins:
        return weakref.ref(twins[id(value())])
    if type(value) is dict:
        items = {key: _translate(entry, twins) for key, entry in value.items()}
        return items if any(items[key] is not value[key] for key in items) else value
    if type(value) in (list, tuple):
        entries = [_translate(entry, twins) for entry in value]
        changed = any(a is not b for a, b in zip(entries, value, strict=True))
        return type(value)(entries) if changed else value
    return value


def _leaf_parameter(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    shared = parameter.detach()  # a view of the same memory where the device is the same
    twin = nn.Parameter(shared.to(device), requires_grad=parameter.requires_grad)
    twin.__dict__.update(parameter.__dict__)
    return twin


def _copied(table: dict[str, Tensor | None], device: torch.device) -> dict[str, Tensor | None]:
    """Own buffers: a forward that updates them in place must not touch the root's."""
    return {
        name: None if buffer is None else buffer.detach().to(device, copy=True)
        for name, buffer in table.items()
    }


def _update(sources: list[nn.Parameter], twins: list[nn.Parameter]) -> None:
    """Brings parameters up to date: those in the root's memory by reference, others by copy."""
    copied: list[tuple[Tensor, Tensor]] = []
    for source, twin in zip(sources, twins, strict=True):
        if source.device == twin.device:
            if source.data_ptr() != twin.data_ptr() or _differs(source, twin):
                twin.data = source.data
        elif _differs(source, twin):
            twin.data = source.detach().to(twin.device, copy=True)
        else:
            copied.append((source.detach(), twin.detach()))
    copy_coalesced([source for source, _ in copied], [twin for _, twin in copied])


def _differs(source: Tensor, twin: Tensor) -> bool:
    return source.shape != twin.shape or source.dtype != twin.dtype
