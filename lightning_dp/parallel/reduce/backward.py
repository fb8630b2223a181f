"""One backward of all replicas, from its first gradient to the sums on the root.

`Backward` is one object per backward, with `commit` and `abort`; `Overlap` sends buckets of
gradients while it runs; `reduce_gradients` adds up what is left at its end (`gradients`).
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_dp.parallel.comm import Packing, are_accelerators, current_stream, wait_for_copies
from lightning_dp.parallel.reduce.gradients import (
    GRAD,
    add_gradients,
    clear_gradients,
    reduce_gradients,
)
from lightning_dp.parallel.replicate import Replicas
from lightning_dp.parallel.torch_private import (
    hooked,
    is_alone_in_memory,
    put_hooks_back,
    take_hooks_off,
)

if TYPE_CHECKING:
    from lightning_dp.parallel.processes import World


class Backward:
    """Made when a backward begins; `commit` ends it, or after an error `abort` and `discard`.

    While it runs, the hooks of the root's parameters are off: autograd would call them with the
    root's part of the gradient. `commit` calls them with the sums, also while gradients accumulate.

    Args:
        replicas: the root and its replicas.
        gradient: of the joint loss.
        overlapping_replicas: those whose gradient buckets are sent during the backward; empty if
            nothing may be sent before its end.
        can_be_undone: whether it may run out of memory and be run again.
        world: the processes, whose gradients are added to the local sums.
    """

    def __init__(
        self,
        replicas: Replicas,
        gradient: Tensor,
        overlapping_replicas: Sequence[int],
        *,
        can_be_undone: bool,
        world: World | None,
    ) -> None:
        self.gradient = gradient
        self._rows, self._packing, self._world = replicas.parameters, replicas.packing, world
        root = self._rows[0]
        positions = hooked(root)
        self._hooks = [SuspendedHooks(root[i]) for i in positions]
        # What earlier backwards have left, where it must not be mixed with this one's sums.
        self._earlier: StashedGradients | None = None
        if can_be_undone or self._hooks or world is not None:
            self._earlier = StashedGradients(root)
        self._overlap: Overlap | None = None
        if 0 in overlapping_replicas:  # else no sums grow on the root
            filled = map(replicas.parameters_of, overlapping_replicas)
            rows = [*{id(row): row for row in filled}.values()]
            devices = list(dict.fromkeys(row[0].device for row in rows))
            if len(devices) > 1 and are_accelerators(devices):
                self._overlap = Overlap(rows, devices, self._packing, positions)

    def commit(self) -> None:
        """Brings the sums to the root: of the replicas, then of all ranks."""
        if self._overlap is not None:
            self._overlap.end()
        if len(self._rows) > 1:
            reduce_gradients(self._rows, self._packing)
        if self._overlap is not None:
            self._overlap.take_sums()
        if self._world is not None:
            from lightning_dp.parallel.processes import sum_gradients

            sum_gradients(self._rows[0], self._world)
        hooks, self._hooks = self._hooks, []
        for suspended in hooks:
            suspended.put_back()
            suspended.call_with_gradient()
        if self._earlier is not None:  # until here it could still be undone
            self._earlier.add()
            self._earlier = None
        for suspended in hooks:
            suspended.call_after_accumulation()

    def abort(self) -> None:
        """Gives the root its earlier gradients and its hooks back, once.

        From here on the caller may change them. It waits for nothing: this may be one of autograd's
        threads.
        """
        if self._earlier is not None:
            self._earlier.put_back()
            self._earlier = None
        for suspended in self._hooks:
            suspended.put_back()
        self._hooks = []

    def discard(self) -> None:
        """Drops what it has left on the replicas; autograd's threads have to be done."""
        self.abort()
        if self._overlap is not None:
            self._overlap.cancel()
        clear_gradients(chain.from_iterable(self._rows[1:]))


class Overlap:
    """Sends buckets of gradients to the root while the backward fills others.

    A hook of every parameter counts. When a replica has all gradients of a bucket, they are taken
    off its parameters; when all replicas have them, the bucket goes up the chain. What a parameter
    gets after that is added at the end, as are buckets that stay incomplete. Autograd calls hooks
    in one thread per device, hence the lock.

    Args:
        rows: the parameters of the replicas that the backward fills; the root's are the first.
        devices: theirs.
        packing: their buckets.
        blocked: positions of parameters whose buckets are not sent before the end.
    """

    def __init__(
        self,
        rows: Sequence[Sequence[Tensor]],
        devices: Sequence[torch.device],
        packing: Packing,
        blocked: Collection[int],
    ) -> None:
        self._rows, self._devices, self._packing = rows, devices, packing
        self._lock = threading.Lock()
        # By bucket and replica: what has no gradient yet, and the streams that wrote the others.
        self._missing: dict[tuple[int, int], set[int]] = {}
        self._streams: dict[tuple[int, int], set[torch.Stream]] = {}
        self._taken: dict[int, dict[int, tuple[list[Tensor], torch.Event]]] = {}
        self._handles: list[RemovableHandle] = []
        for j, bucket in enumerate(packing.buckets):
            leaves = [p.is_leaf and p.requires_grad for row in rows for p in bucket.of(row)]
            if not all(leaves) or not bucket.positions.isdisjoint(blocked):
                continue
            for r, row in enumerate(rows):
                self._missing[j, r], self._streams[j, r] = {*bucket.order}, set()
                for i in bucket.order:
                    count = partial(self._count, j, r, i)
                    self._handles.append(row[i].register_post_accumulate_grad_hook(count))

    def _count(self, j: int, r: int, i: int, parameter: Tensor) -> None:
        """A hook: replica r has accumulated the gradient of position i, in bucket j."""
        missing = self._missing.get((j, r))
        if missing is None:  # the bucket has left
            return
        here, streams = current_stream(parameter.device), self._streams[j, r]
        streams.add(here)
        missing.discard(i)
        if missing:
            return
        del self._missing[j, r]
        bucket = self._packing.buckets[j]
        parameters = bucket.of(self._rows[r])
        gradients = [p.grad for p in parameters]
        if not bucket.is_whole(gradients):
            return
        for stream in streams - {here}:
            here.wait_stream(stream)
        # The root's are summed in place: autograd may still read those of which it has a view.
        gradients = [g if r > 0 or is_alone_in_memory(g) else g.clone() for g in gradients]
        ready = here.record_event()
        clear_gradients(parameters)
        with self._lock:
            by_replica = self._taken.setdefault(j, {})
            by_replica[r] = gradients, ready
            if len(by_replica) == len(self._rows):
                taken = [by_replica[k] for k in range(len(by_replica))]
                self._packing.add_up(j, [row for row, _ in taken], [e for _, e in taken])

    def end(self) -> None:
        """The backward has ended: gradients that have not left are their parameters' again."""
        self._unhook()
        for j, by_replica in list(self._taken.items()):
            if len(by_replica) < len(self._rows):
                for r in by_replica:
                    self._put_back(j, r)
                del self._taken[j]

    def take_sums(self) -> None:
        """Gives the root the sums; its current stream waits for them."""
        wait_for_copies(self._devices)
        for j in self._taken:
            self._put_back(j, 0)
        self._taken.clear()

    def cancel(self) -> None:
        """Drops the gradients of a backward that has failed, once copies have read them."""
        self._unhook()
        wait_for_copies(self._devices)
        self._taken.clear()

    def _unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._missing.clear()

    def _put_back(self, j: int, r: int) -> None:
        """Gives a replica its gradients back, and adds what its parameters have got since then."""
        gradients, _ = self._taken[j][r]
        parameters = self._packing.buckets[j].of(self._rows[r])
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if parameter.grad is not None:
                gradient.add_(parameter.grad)
            parameter.grad = gradient


# Gradients and hooks of before


class StashedGradients:
    """The gradients of earlier backwards, set aside while another backward fills `.grad`."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = list(parameters)
        self._earlier = list(map(GRAD, self._parameters))
        clear_gradients(self._parameters)

    def put_back(self) -> None:
        """Only the earlier gradients remain."""
        for parameter, earlier in zip(self._parameters, self._earlier, strict=True):
            parameter.grad = earlier

    def add(self) -> None:
        """Adds the new gradients to the earlier ones, in place, as accumulation does."""
        new = list(map(GRAD, self._parameters))
        for parameter, earlier in zip(self._parameters, self._earlier, strict=True):
            if earlier is not None:
                parameter.grad = earlier
        add_gradients(list(self._earlier), new)


class SuspendedHooks:
    """Takes a parameter's hooks off it until `put_back`: autograd calls none of them."""

    def __init__(self, parameter: Tensor) -> None:
        self._parameter, self._hooks = parameter, take_hooks_off(parameter)
        self._has_gradient = False

    def put_back(self) -> None:
        """Autograd calls them again."""
        put_hooks_back(self._parameter, self._hooks)

    def call_with_gradient(self) -> None:
        """Calls the tensor's hooks with its new gradient, which they may replace."""
        gradient = self._parameter.grad
        self._has_gradient = gradient is not None
        if gradient is not None:
            for hook in (self._hooks.on_gradient or {}).values():
                answer = hook(gradient)
                gradient = gradient if answer is None else answer
            self._parameter.grad = gradient

    def call_after_accumulation(self) -> None:
        """Calls the hooks that see the parameter once its gradient has been accumulated."""
        if self._has_gradient:
            for hook in (self._hooks.on_parameter or {}).values():
                hook(self._parameter)
