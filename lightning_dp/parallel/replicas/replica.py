"""One replica: the module as it stands on one device besides the root."""

from __future__ import annotations

from collections.abc import Callable
from itertools import compress, count
from operator import ne
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dp.parallel.links import copy_coalesced
from lightning_dp.parallel.replicas.attributes import AttributeMirror
from lightning_dp.parallel.replicas.broadcast import broadcast
from lightning_dp.parallel.replicas.compiled import compiled_attributes
from lightning_dp.parallel.replicas.structure import (
    ModuleStructure,
    ReplicaRules,
    RootState,
    by_dtype,
    entries,
)


class Replica:
    """The module as it stands on one device other than the first entry."""

    def __init__(
        self, source: ModuleStructure, k: int, device: torch.device, rules: ReplicaRules
    ) -> None:
        self._source = source
        self.shares_memory = all(p.device == device for p in source.parameters)
        """Whether the parameters' memory is the root's, so that there is nothing to copy."""
        self._device = device
        self._seen = RootState(source, versions=not self.shares_memory, buffer_versions=True)
        self._seen_buffers = self._seen
        self.parameters = [_leaf_parameter(p, device) for p in source.parameters]
        self.buffer_tables: list[dict[str, Tensor | None]] = [{} for _ in source.buffer_tables]
        self._replace_buffers(self._seen)
        self._connected: list[Tensor] = []
        self._twins = twins = self._make_twins(k, device, rules)
        place = next((p.device for p in source.parameters), device)
        self._mirrors = [
            AttributeMirror(
                module, twins, buffers, rules.own_attributes(module, k, device), place, device
            )
            for module, buffers in zip(source.modules, self.buffer_tables, strict=True)
        ]
        for original, mirror in zip(source.modules, self._mirrors, strict=True):
            mirror.own(compiled_attributes(original, twins[id(original)]))
        self.module: nn.Module = twins[id(source.root)]
        self.submodules: list[nn.Module] = [twins[id(m)] for m in source.modules]
        self._attributes = [module.__dict__ for module in self.submodules]
        self._attribute_versions: list[int] = []
        self._attribute_counts: list[int] = []
        self._watched: list[AttributeMirror] = []

    def refresh(self, state: RootState, parameters: str, buffers: bool, silent: set[int]) -> None:
        """Follows the root, whose state is `state`.

        Args:
            state: the root's; without versions of the buffers, all buffers count as changed.
            parameters: which are copied, see `Replicas.refresh`.
            buffers: whether to look for buffers that changed, and copy them.
            silent: positions of parameters to copy although they look unchanged.
        """
        self._refresh_attributes(self._source.attribute_versions)
        self._refresh_parameters(state, parameters, silent)
        if buffers:
            self._refresh_buffers(state, everything=parameters == "all")
            self._seen_buffers = state
        self._seen = state

    def _refresh_attributes(self, versions: list[int]) -> None:
        # All at once first: nearly always nothing has changed.
        if (
            versions == self._attribute_versions
            and list(map(len, self._attributes)) == self._attribute_counts
            and not any(mirror.is_stale() for mirror in self._watched)
        ):
            return
        for mirror, version in zip(self._mirrors, versions, strict=True):
            if mirror.version != version or mirror.is_stale():
                mirror.refresh()
                mirror.version = version
        self._attribute_versions = list(versions)
        self._attribute_counts = list(map(len, self._attributes))
        self._watched = [mirror for mirror in self._mirrors if mirror.has_to_be_watched]

    def refresh_parameters(self, state: RootState) -> None:
        """Follows the root's parameters alone, where they look changed."""
        self._refresh_parameters(state, "changed", set())
        self._seen = state

    def keep(self, position: int, name: str) -> None:
        """Lets a submodule keep the attribute that it has now, until the root's is bound anew."""
        self._mirrors[position].keep(name)

    def connect(self, after_backward: Callable[[], None]) -> None:
        """Computes with functions of the root's parameters; without gradients, with its own."""
        was_connected = bool(self._connected)
        if torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters):
            self._connected = broadcast(self._source.parameters, self.parameters, after_backward)
        elif not self._stays_connected():
            self._connected = []
        if self._connected or was_connected:
            tensors = self._connected or self.parameters
            pairs = zip(self._source.parameters, tensors, strict=True)
            twins = {**self._twins, **{id(original): tensor for original, tensor in pairs}}
            for mirror in self._mirrors:
                mirror.bind(twins)

    def disconnect(self) -> None:
        """Computes with its own parameters again, and lets go of the graph.

        A graph that reaches a tensor of ours, which holds the graph, is never freed: Python's
        collector does not see through it.
        """
        own = {id(t): p for t, p in zip(self._connected, self.parameters, strict=False)}
        self._connected = []
        for mirror in self._mirrors if own else ():
            mirror.replace(own)

    def _stays_connected(self) -> bool:
        """Whether the tensors of the latest call with gradients serve one without them as well.

        That call's backward may still recompute a part of it (reentrant checkpoints), which would
        otherwise find parameters that lead nowhere.
        """
        if torch.is_grad_enabled():
            return False
        now, then = map(Tensor.data_ptr, self.parameters), map(Tensor.data_ptr, self._connected)
        return list(now) == list(then)

    def _make_twins(self, k: int, device: torch.device, rules: ReplicaRules) -> dict[int, Any]:
        """What stands for each parameter and module of the root, by the original's id."""
        source = self._source
        pairs = zip(source.parameters, self.parameters, strict=True)
        twins: dict[int, Any] = {id(original): twin for original, twin in pairs}
        twins.update({id(m): object.__new__(type(m)) for m in source.modules})
        twins.update({id(m): rules.copy_leaf(m, k, device) for m in source.leaves})
        return twins

    def _refresh_parameters(self, state: RootState, policy: str, silent: set[int]) -> None:
        roots = self._source.parameters
        if state.requires_grad != self._seen.requires_grad:
            for root, twin in zip(roots, self.parameters, strict=True):
                twin.requires_grad_(root.requires_grad)
        noticed = self._changed_parameters(state)
        if noticed or silent or policy != "changed":
            _update(
                [
                    (root, twin, i in noticed)
                    for i, (root, twin) in enumerate(zip(roots, self.parameters, strict=True))
                    if i in noticed
                    or i in silent
                    or policy == "all"
                    or (policy == "trained" and root.requires_grad)
                ]
            )

    def _changed_parameters(self, state: RootState) -> set[int]:
        """Positions of parameters that were replaced or, in other memory than ours, written to."""
        seen = self._seen
        changed: set[int] = set()
        if state.pointers != seen.pointers:
            changed.update(compress(count(), map(ne, state.pointers, seen.pointers)))
        if not self.shares_memory and state.versions != seen.versions:
            changed.update(compress(count(), map(ne, state.versions, seen.versions)))
        return changed

    def _refresh_buffers(self, state: RootState, everything: bool) -> None:
        own = list(map(id, entries(self.buffer_tables)))
        # Assigning to a buffer, here or there, puts another tensor in its place.
        if state.buffer_ids != self._seen_buffers.buffer_ids or own != self._own_buffer_ids:
            self._replace_buffers(state)
        elif (
            everything
            or state.buffer_versions is None
            or state.buffer_versions != self._seen_buffers.buffer_versions
        ):
            for dtype, flat in self._flat_buffers.items():
                flat.copy_(state.packed_buffers[dtype], non_blocking=True)

    def _replace_buffers(self, state: RootState) -> None:
        """Takes the root's buffers as they are now.

        They are views of one tensor per dtype, so that a refresh is one copy; through `.data`,
        since a forward that writes to one of them must not seem to have written to all.
        """
        self._flat_buffers = {
            dtype: flat.to(self._device, copy=True) for dtype, flat in state.packed_buffers.items()
        }
        groups = by_dtype(state.buffers)
        parts = {
            dtype: iter(torch.split(flat, [buffer.numel() for buffer in groups[dtype]]))
            for dtype, flat in self._flat_buffers.items()
        }
        for original, own in zip(self._source.buffer_tables, self.buffer_tables, strict=True):
            own.clear()
            for name, buffer in original.items():
                own[name] = (
                    None if buffer is None else next(parts[buffer.dtype]).data.view(buffer.shape)
                )
        self._own_buffer_ids = list(map(id, entries(self.buffer_tables)))


def _leaf_parameter(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    shared = parameter.detach()  # a view of the same memory where the device is the same
    twin = nn.Parameter(_trainable(shared.to(device)), requires_grad=parameter.requires_grad)
    twin.__dict__.update(parameter.__dict__)
    return twin


def _trainable(tensor: Tensor) -> Tensor:
    """A tensor of the same memory that is no inference tensor: callbacks bind weights to such."""
    if not tensor.is_inference():
        return tensor
    memory = tensor.untyped_storage()
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())


def _update(stale: list[tuple[nn.Parameter, nn.Parameter, bool]]) -> None:
    """Brings parameters up to date: those in the root's memory by reference, others by copy.

    Where the root's change left no trace (the third entry says whether it did), neither does the
    copy: graphs of earlier calls stay usable, as they do on one device.
    """
    copied: list[tuple[Tensor, Tensor]] = []
    for source, twin, noticed in stale:
        if source.device == twin.device:
            if source.data_ptr() != twin.data_ptr() or _differs(source, twin):
                twin.data = source.data
        elif _differs(source, twin):
            twin.data = source.detach().to(twin.device, copy=True)
        else:
            copied.append((source.data, twin.detach() if noticed else twin.data))
    copy_coalesced([source for source, _ in copied], [twin for _, twin in copied])


def _differs(source: Tensor, twin: Tensor) -> bool:
    return source.shape != twin.shape or source.dtype != twin.dtype
