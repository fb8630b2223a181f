"""One replica: the module as it stands on one device besides the root."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

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
from lightning_dp.parallel.replicas.weights import Weights

_GRAD = attrgetter("grad")


class Replica:
    """The module as it stands on one device other than the first entry."""

    def __init__(
        self,
        source: ModuleStructure,
        k: int,
        device: torch.device,
        rules: ReplicaRules,
        weights: Weights,
    ) -> None:
        self._source = source
        self.weights = weights
        self.shares_memory = weights.shares_memory
        self.parameters = weights.parameters
        self.shared: set[int] = set()
        """Positions of the parameters in the place of which it has the root's own."""
        self._device = device
        self._seen = RootState(source, versions=not self.shares_memory, buffer_versions=True)
        self._seen_buffers = self._seen
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

    def refresh(
        self, state: RootState, parameters: str, buffers: bool, silent: set[int]
    ) -> set[int]:
        """Follows the root, whose state is `state`, but for parameters that have to be copied.

        Args:
            state: the root's; without versions of the buffers, all buffers count as changed.
            parameters: which are copied, see `Replicas.refresh`.
            buffers: whether to look for buffers that changed, and copy them.
            silent: positions of parameters to copy although they look unchanged.

        Returns:
            The positions of the parameters that have to be copied.
        """
        self._refresh_attributes(state.attribute_versions)
        stale: set[int] = set()
        if silent or parameters != "changed" or state.parameters != self._seen.parameters:
            stale = self.weights.follow(state, self._seen, parameters, silent)
        if buffers:
            self._refresh_buffers(state, everything=parameters == "all")
            self._seen_buffers = state
        self._seen = state
        return stale

    def _refresh_attributes(self, versions: list[int]) -> None:
        # All at once first: nearly always nothing has changed.
        if (
            versions == self._attribute_versions
            and list(map(len, self._attributes)) == self._attribute_counts
            and not (self._watched and any(mirror.is_stale() for mirror in self._watched))
        ):
            return
        for mirror, version in zip(self._mirrors, versions, strict=True):
            if mirror.version != version or mirror.is_stale():
                mirror.refresh()
                mirror.version = version
        self._attribute_versions = list(versions)
        self._attribute_counts = list(map(len, self._attributes))
        self._watched = [mirror for mirror in self._mirrors if mirror.has_to_be_watched]

    def refresh_parameters(self, state: RootState) -> set[int]:
        """Follows the root's parameters alone, where they look changed; see `refresh`."""
        stale = self.weights.follow(state, self._seen, "changed", set())
        self._seen = state
        return stale

    def has_gradients(self) -> bool:
        """Whether gradients have accumulated on its own parameters."""
        return bool(set(map(type, map(_GRAD, self.parameters))) - {type(None)})

    def share(self, positions: set[int]) -> None:
        """Computes with the root's own parameters of these positions, and no others."""
        if positions == self.shared:
            return
        pairs = list(zip(self._source.parameters, self.parameters, strict=True))
        others = {id(pairs[i][0]): pairs[i][1] for i in self.shared - positions}
        others |= {id(pairs[i][1]): pairs[i][0] for i in positions - self.shared}
        for mirror in self._mirrors:
            mirror.share(others, {id(pairs[i][1]): pairs[i][0] for i in positions})
        self.shared = positions

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
