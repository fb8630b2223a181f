"""Weights: the parameters of a replica, in the root's memory or, on another device, in its own."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import compress, count, repeat
from operator import ne
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_dp.parallel.links import Arrival, Packed, Packing, can_be_packed, kind
from lightning_dp.parallel.replicas.arriving import Arriving, is_worth_it
from lightning_dp.parallel.replicas.changes import ParameterState


class Weights:
    """The parameters of one replica, which are leaves.

    Where they share the root's memory, there is nothing to copy. In `noticed` are the positions of
    those of the root that seemed changed when they were followed last, in `seen` what it was then.
    """

    def __init__(
        self, roots: Sequence[nn.Parameter], device: torch.device, packing: Packing
    ) -> None:
        self.shares_memory = all(p.device == device for p in roots)
        self.noticed: set[int] = set()
        self.is_behind = False  # an optimizer has written to the root's
        self.arriving: Arriving | None = None
        self._apart: set[int] = set()
        self.seen = ParameterState.of(roots, versions=not self.shares_memory)
        self._roots, self.device = roots, device
        if self.shares_memory:
            self._memory = [p.detach() for p in roots]
        else:
            self._make_memory(packing)
        self.parameters = list(map(_leaf_parameter, roots, self._memory))

    def _make_memory(self, packing: Packing) -> None:
        self.packed, self._memory = packing.memory(self._roots, self.device)
        self._pointers = list(map(Tensor.data_ptr, self._memory))

    def follow(self, state: ParameterState, policy: str, silent: set[int]) -> set[int]:
        """Follows the root, but for what has to be copied: these positions it returns.

        By policy, see `Replicas.refresh`, and the `silent` ones although they look unchanged.
        """
        seen, self.seen = self.seen, state
        if state.requires_grad != seen.requires_grad:
            for root, twin in zip(self._roots, self.parameters, strict=True):
                twin.requires_grad_(root.requires_grad)
        self.noticed = set(compress(count(), map(ne, state.pointers, seen.pointers)))
        if not self.shares_memory:
            self.noticed.update(compress(count(), map(ne, state.versions, seen.versions)))
        # While they were frozen they may have been written to without a trace.
        thawed = compress(count(), map(ne, state.requires_grad, seen.requires_grad))
        stale = self.noticed.union(silent, thawed)
        if policy == "changed" and self.is_behind:
            policy = "trained"
        self.is_behind = False
        if policy != "changed":
            chosen = state.requires_grad if policy == "trained" else repeat(True, len(self._roots))
            stale.update(compress(count(), chosen))
        if not self.shares_memory:
            return stale
        for i in stale:
            root, twin = self._roots[i], self.parameters[i]
            if root.data_ptr() != twin.data_ptr() or kind(root) != kind(twin):
                twin.data = root.data
        return set()

    def keep_apart(self, positions: set[int]) -> None:
        """Has memory of its own for these, with the root's values, and the root's for all else.

        For parameters in the root's memory, of which steps write to some.
        """
        for i in self._apart - positions:
            self.parameters[i].data = self._roots[i].data
        for i in positions:
            root, twin = self._roots[i], self.parameters[i]
            if root.data_ptr() == twin.data_ptr() or kind(root) != kind(twin):
                twin.data = root.data.clone()
            else:
                twin.data.copy_(root.data)
        self._apart = positions

    def can_be_late(self, modules: Iterable[nn.Module]) -> None:
        """From now on a call of these modules, of this replica, may begin before they are there."""
        if self.device.type != "cpu" and not self.shares_memory:
            self.arriving = Arriving(self.device, self.parameters, modules)

    def move(self, packing: Packing) -> None:
        """Takes other memory, for parameters of other kinds."""
        self._make_memory(packing)
        for twin, memory in zip(self.parameters, self._memory, strict=True):
            twin.data = memory
        if self.arriving is not None:
            self.arriving.learn_memory()

    def take_back(self) -> set[int]:
        """Binds parameters to their memory again that a step has bound to values of its own."""
        bound = set(
            compress(count(), map(ne, map(Tensor.data_ptr, self.parameters), self._pointers))
        )
        for i in bound:
            self.parameters[i].data = self._memory[i]
        return bound

    def copy(self, stale: set[int]) -> None:
        """Copies some of the root's, one by one."""
        for i in stale:
            self.parameters[i].data.copy_(self._roots[i].data)


class WeightCopies:
    """The parameters of all replicas elsewhere: packed on the root's device, and sent."""

    def __init__(self, roots: Sequence[nn.Parameter]) -> None:
        self._roots = roots
        self._elsewhere: list[Weights] = []
        self.packing = Packing(roots)
        self._ids = set(map(id, roots))
        self.are_late: list[Arriving] = []
        self.bound = ParameterState([], [], [])  # without versions: what sharing replicas have seen
        self._plain = [root for root in roots if can_be_packed(root)]
        self._pointers = list(map(Tensor.data_ptr, self._plain))
        self._strides = list(map(Tensor.stride, self._plain))

    def on(self, device: torch.device) -> Weights:
        """Parameters for a replica on a device, with the root's values."""
        weights = Weights(self._roots, device, self.packing)
        if not weights.shares_memory:
            if not self._elsewhere:
                self._follow_optimizers()
            self._elsewhere.append(weights)
            self._send([(weights, set(range(len(self._roots))))])
        return weights

    def refresh(
        self,
        copies: Sequence[Weights],
        state: ParameterState,
        policy: str = "changed",
        silent: set[int] | None = None,
        late: bool = False,
    ) -> None:
        """Brings replicas up to date with the root's parameters, see `Weights.follow`.

        If they may be `late`, some are still on their way: see `Arriving`, until `arrive`.
        """
        stale = []
        # One object as long as it is equal, which all replicas have seen then.
        bound = state._replace(versions=[])
        self.bound = bound = self.bound if bound == self.bound else bound
        for weights in copies:
            now = bound if weights.shares_memory else state
            is_seen = weights.seen is now or weights.seen == now
            if is_seen:
                weights.seen = now
            if silent or policy != "changed" or weights.is_behind or not is_seen:
                positions = weights.follow(now, policy, silent or set())
                if positions:
                    stale.append((weights, positions))
        if stale:
            # With more devices blocks would be packed in the few steps of one of them alone.
            joined = len({own.device for own in self._elsewhere}) == 1
            late = late and all([own.arriving is not None for own, _ in stale])
            arrivals = self._send(stale, joined=joined, late=late)
            for weights, _ in stale if late else ():
                self._begin(weights, arrivals)

    def _begin(self, weights: Weights, arrivals: dict[torch.device, list[Arrival]]) -> None:
        arriving = weights.arriving
        if arriving is not None and weights.device in arrivals:
            self.are_late.append(arriving)
            arriving.begin(arrivals[weights.device])

    def arrive(self) -> None:
        """The current streams go on when all is there."""
        self.packing.arrive()
        while self.are_late:
            self.are_late[-1].end()
            self.are_late.pop()  # last: an interrupt may come in between

    def _fits(self) -> bool:
        """Whether the packing is for the root's parameters as they are; strides need new memory."""
        pointers = list(map(Tensor.data_ptr, self._plain))
        if pointers != self._pointers:
            before, self._strides = self._strides, list(map(Tensor.stride, self._plain))
            self._pointers = pointers
            if before != self._strides:
                return False
        return self.packing.fits(self._roots)

    def _follow_optimizers(self) -> None:
        hook = register_optimizer_step_post_hook(partial(_after_optimizer, weakref.ref(self)))
        weakref.finalize(self, hook.remove)

    def after_optimizer(self, optimizer: Optimizer) -> None:
        """Notes that an optimizer has taken a step: fused ones leave no trace in versions."""
        for group in optimizer.param_groups:
            if not self._ids.isdisjoint(map(id, group["params"])):
                for weights in self._elsewhere:
                    weights.is_behind = True

    def _send(
        self, stale: list[tuple[Weights, set[int]]], *, joined: bool = False, late: bool = False
    ) -> dict[torch.device, list[Arrival]]:
        """Copies parameters of these positions; where they are most of a bucket, all of it.

        Where the root's change left no trace, neither does the copy: graphs of earlier calls stay
        usable, as they do on one device.
        """
        if not self._fits():
            self.packing = Packing(self._roots)
            for weights in self._elsewhere:
                weights.move(self.packing)
            stale = [(weights, set(range(len(self._roots)))) for weights in self._elsewhere]
        targets: list[list[Packed]] = [[] for _ in self.packing.buckets]
        for weights, positions in stale:
            positions |= weights.take_back()
            for j, bucket in enumerate(self.packing.buckets):
                if 2 * len(positions & bucket.positions) >= len(bucket.positions):
                    targets[j].append(weights.packed[j])
                    positions -= bucket.positions
            weights.copy(positions)
            increment_version([weights.parameters[i] for i in weights.noticed])
        going = zip(self.packing.buckets, targets, strict=True)
        size = sum([bucket.bytes for bucket, there in going if there])
        late = late and is_worth_it(size, len(self._roots))
        return self.packing.send(self._roots, targets, joined=joined, late=late)


def _after_optimizer(
    copies: Callable[[], WeightCopies | None], optimizer: Optimizer, *_: Any
) -> None:
    """A hook of all optimizers, for as long as the copies live."""
    living = copies()
    if living is not None:
        living.after_optimizer(optimizer)


def _leaf_parameter(root: nn.Parameter, memory: Tensor) -> nn.Parameter:
    twin = nn.Parameter(_trainable(memory), requires_grad=root.requires_grad)
    twin.__dict__.update(root.__dict__)
    return twin


def _trainable(tensor: Tensor) -> Tensor:
    """A tensor of the same memory that is no inference tensor: callbacks bind weights to such."""
    if not tensor.is_inference():
        return tensor
    memory = tensor.untyped_storage()
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())
