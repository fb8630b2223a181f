"""One backward of all replicas, from its first gradient to the sums on the root.

`Backward` is one object per backward, with `commit` and `abort`; `Overlap` sends buckets of
gradients while it runs; `reduce_gradients` adds up what is left at its end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, product
from operator import attrgetter
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_dp.parallel.comm import (
    Packing,
    add_each,
    can_be_packed,
    current_stream,
    gradients_on,
    wait_for_copies,
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

Gradients: TypeAlias = list[Tensor | None]

_GRAD: Callable[[Tensor], Tensor | None] = attrgetter("grad")


class Backward:
    """Made when a backward begins; `commit` ends it, or after an error `abort` and `discard`.

    While it runs, the hooks of the root's parameters are off: autograd would call them with the
    root's part of the gradient. `commit` calls them with the sums, also while gradients accumulate.

    Args:
        replicas: the root and its replicas.
        gradient: of the joint loss.
        fills: the replicas that get gradients, if buckets may leave while it runs; else none.
        can_be_undone: whether it may run out of memory and be run again.
        world: the processes, whose gradients are added to the local sums.
    """

    def __init__(
        self,
        replicas: Replicas,
        gradient: Tensor,
        fills: Sequence[int],
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
        if 0 in fills:  # else no sums grow on the root
            rows = [*{id(row): row for row in map(replicas.parameters_of, fills)}.values()]
            devices = list(dict.fromkeys(row[0].device for row in rows))
            if len(devices) > 1 and self._packing.sums.prepare(devices):
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
        blocked: positions of parameters whose buckets stay.
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
        parameters = self._packing.buckets[j].of(self._rows[r])
        gradients = [p.grad for p in parameters]
        if not self._packing.sums.is_whole(gradients, j):
            return
        for stream in streams - {here}:
            here.wait_stream(stream)
        # The root's are summed in place: autograd may still read those of which it has a view.
        own = [g if r > 0 or is_alone_in_memory(g) else g.clone() for g in gradients]
        ready = here.record_event()
        clear_gradients(parameters)
        with self._lock:
            there = self._taken.setdefault(j, {})
            there[r] = own, ready
            if len(there) == len(self._rows):
                taken = [there[k] for k in range(len(there))]
                self._packing.sums.send(j, [row for row, _ in taken], [e for _, e in taken])

    def end(self) -> None:
        """The backward has ended: gradients that have not left are their parameters' again."""
        self._unhook()
        for j, there in list(self._taken.items()):
            if len(there) < len(self._rows):
                for r in there:
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
        """With what the parameters have got later."""
        gradients, _ = self._taken[j][r]
        parameters = self._packing.buckets[j].of(self._rows[r])
        for parameter, own in zip(parameters, gradients, strict=True):
            if parameter.grad is not None:
                own.add_(parameter.grad)
            parameter.grad = own


# Sums of gradients


@contextmanager
def single_threaded() -> Iterator[None]:
    """While it lasts, torch uses no team of OpenMP threads: they would spin beside the workers."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def reduce_gradients(
    parameters: Sequence[Sequence[Tensor]], packing: Packing | None = None
) -> None:
    """Adds the replicas' gradients to the root's, in place, and clears theirs.

    A parameter without a gradient on any replica keeps None. Between accelerators, buckets that are
    complete go by the chain; all else is copied to the root and added there.

    Args:
        parameters: of each replica, the root's first.
        packing: the buckets of the parameters.
    """
    root, others = parameters[0], parameters[1:]
    if not root or not others:
        return
    sums, rows = list(map(_GRAD, root)), [list(map(_GRAD, replica)) for replica in others]
    before, devices = list(sums), [replica[0].device for replica in parameters]
    if len({*devices}) > 1 and packing is not None:
        _add_by_chain(sums, rows, packing, list(dict.fromkeys(devices)))
    for row, device in zip(rows, devices[1:], strict=True):
        _add(sums, row if device == devices[0] else gradients_on(devices[0], row))
    for parameter, total, old in zip(root, sums, before, strict=True):
        if total is not old and total is not None:
            parameter.grad = as_accumulated(total, parameter)
    clear_gradients(chain.from_iterable(others))


def _add_by_chain(
    sums: Gradients, rows: list[Gradients], packing: Packing, devices: list[torch.device]
) -> None:
    """Adds the buckets of which each replica has all or nothing; in the rows they are None then."""
    if not packing.sums.prepare(devices):
        return
    try:
        for j, bucket in enumerate(packing.buckets):
            total, own = bucket.of(sums), [bucket.of(row) for row in rows]
            there = [row for row in own if any(g is not None for g in row)]
            if there and all(packing.sums.is_whole(row, j) for row in (total, *there)):
                packing.sums.send(j, [total, *there])
                for row, i in product(rows, bucket.order):
                    row[i] = None
    finally:
        wait_for_copies(devices)


def _add(sums: Gradients, row: Gradients) -> None:
    """Adds gradients to the sums; where there is no sum yet, the gradient becomes it."""
    pairs = []
    for i, gradient in enumerate(row):
        total = sums[i]
        if total is None:
            sums[i] = gradient
        elif gradient is not None:
            pairs.append((total, gradient))
    if pairs:
        add_each([total for total, _ in pairs], [gradient for _, gradient in pairs])


def as_accumulated(gradient: Tensor, parameter: Tensor) -> Tensor:
    """A gradient with the strides that autograd gives it; fused optimizers rely on them.

    They are the parameter's, where its memory is dense; else those of contiguous rows.
    """
    if gradient.layout is not torch.strided or gradient.stride() == parameter.stride():
        return gradient
    if not (can_be_packed(parameter) and can_be_packed(gradient)):
        return gradient
    like = torch.empty_like(parameter, dtype=gradient.dtype)
    if like.stride() != parameter.stride():
        return gradient.contiguous()
    return like.copy_(gradient)


def clear_gradients(parameters: Iterable[Tensor]) -> None:
    """Sets gradients to None."""
    for parameter in parameters:
        parameter.grad = None


class StashedGradients:
    """The gradients of earlier backwards, set aside while another backward fills `.grad`."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = list(parameters)
        self._earlier = list(map(_GRAD, self._parameters))
        clear_gradients(self._parameters)

    def put_back(self) -> None:
        """Only the earlier gradients remain."""
        for parameter, earlier in zip(self._parameters, self._earlier, strict=True):
            parameter.grad = earlier

    def add(self) -> None:
        """Adds the new gradients to the earlier ones, in place, as accumulation does."""
        new = list(map(_GRAD, self._parameters))
        for parameter, earlier in zip(self._parameters, self._earlier, strict=True):
            if earlier is not None:
                parameter.grad = earlier
        _add(list(self._earlier), new)


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
