"""One backward of all replicas, from its first gradient to the sums on the root."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_dp.parallel.comm import Packing, current_stream, wait_for_copies
from lightning_dp.parallel.reduce.gradients import (
    GradientsAside,
    HooksOff,
    Spread,
    clear_gradients,
    reduce_gradients,
)
from lightning_dp.parallel.replicate import Replicas
from lightning_dp.parallel.torch_private import (
    accumulation_hooks,
    gradient_hooks,
    hooked,
    is_alone_in_memory,
)

if TYPE_CHECKING:
    from lightning_dp.parallel.processes import RankReducer


class Backward:
    """Made when a backward begins; `commit` ends it, or after an error `abort` and `discard`.

    While it runs, the hooks of the root's parameters are off: autograd would call them with the
    root's part of the gradient. `commit` calls them with the sums, also while gradients accumulate.

    Args:
        replicas: the root and its replicas.
        fills: the replicas that get gradients, if buckets may leave while it runs; else None.
        accumulates: whether gradients stay on the replicas, for a later backward to sum.
        can_be_undone: whether it may run out of memory and be run again. Then the gradients of
            earlier backwards are aside until it has succeeded.
        ranks: the other processes; their gradients are added after the local sums.
    """

    def __init__(
        self,
        replicas: Replicas,
        fills: Sequence[int] | None,
        *,
        accumulates: bool,
        can_be_undone: bool,
        ranks: RankReducer | None,
    ) -> None:
        self.accumulates = accumulates
        self._ranks, self._rows, self._packing = ranks, replicas.parameters, replicas.packing
        root = replicas.root_parameters
        has_hooks = any(map(gradient_hooks, root)) or any(map(accumulation_hooks, root))
        with_hooks = hooked(root) if has_hooks else []
        if ranks is not None:
            if waiting := ranks.own_among([root[i] for i in with_hooks]):
                # They got hooks after a backward that accumulated.
                reduce_gradients(self._rows, self._packing)
                ranks.sum_(waiting)
            ranks.begin(root, with_hooks, stay=accumulates)
        self._hooks = [
            ([row[i] for row in self._rows], HooksOff(root[i]), root[i].grad) for i in with_hooks
        ]
        for own, hooks, _ in self._hooks:
            hooks.take()
            own[0].grad = None
        self._aside: list[GradientsAside] = []  # the root's, and those of the others
        if can_be_undone:
            others = chain.from_iterable(self._rows[1:])
            self._aside = [GradientsAside(root), GradientsAside(others)]
        self._overlap: Overlap | None = None
        if fills is not None and 0 in fills and not accumulates:  # else no sums grow on the root
            rows = [*{id(row): row for row in map(replicas.parameters_of, fills)}.values()]
            devices = list(dict.fromkeys(row[0].device for row in rows))
            if len(devices) > 1 and self._packing.sums.prepare(devices):
                self._overlap = Overlap(rows, devices, self._packing, with_hooks)
        self._is_aborted = False

    def commit(self, spread: Spread | None = None) -> None:
        """Brings the sums to the root: of the replicas, then of all ranks."""
        if self._overlap is not None:
            self._overlap.end()
        self._call_hooks()
        if not self.accumulates:
            reduce_gradients(self._rows, self._packing, spread)
        if self._overlap is not None:
            self._overlap.take_sums()
        aside, self._aside = self._aside, []  # until here it could still be undone
        for earlier in aside:
            earlier.add()
        if not self.accumulates and aside and aside[1].has_any:
            reduce_gradients(self._rows, self._packing, spread)
        if self._ranks is not None and not self.accumulates:
            self._ranks.finish()

    def _call_hooks(self) -> None:
        if not self._hooks:
            return
        reduce_gradients([*zip(*(own for own, _, _ in self._hooks), strict=True)])
        if self._ranks is not None:
            self._ranks.sum_([own[0] for own, _, _ in self._hooks])
        called, self._hooks = self._hooks, []
        for _, hooks, _ in called:
            hooks.put_back()
        for _, hooks, earlier in called:
            hooks.call(earlier)

    def abort(self) -> None:
        """Gives the root its earlier gradients and its hooks back, once.

        From here on the caller may change them. It waits for nothing: this may be one of autograd's
        threads.
        """
        if self._is_aborted:
            return
        self._is_aborted = True
        for root in self._aside[:1]:
            root.put_back()
        for own, hooks, earlier in self._hooks:
            own[0].grad = earlier
            hooks.put_back()

    def discard(self) -> None:
        """Drops what it has left on the replicas; autograd's threads have to be done."""
        self.abort()
        if self._overlap is not None:
            self._overlap.cancel()
        if self._ranks is not None:
            self._ranks.cancel()
        for others in self._aside[1:]:
            others.put_back()


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
        self._sent: list[int] = []
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
                self._sent.append(j)
                taken = [there[k] for k in range(len(there))]
                self._packing.sums.send(j, [row for row, _ in taken], [e for _, e in taken])

    def end(self) -> None:
        """The backward has ended: gradients that have not left are their parameters' again."""
        self._unhook()
        for j in self._taken.keys() - {*self._sent}:
            for r, (gradients, _) in self._taken[j].items():
                self._put_back(j, r, gradients)

    def take_sums(self) -> None:
        """Gives the root the sums; its current stream waits for them."""
        wait_for_copies(self._devices)
        for j in self._sent:
            self._put_back(j, 0, self._taken[j][0][0])
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

    def _put_back(self, j: int, r: int, gradients: list[Tensor]) -> None:
        """With what the parameters have got later."""
        for parameter, own in zip(
            self._packing.buckets[j].of(self._rows[r]), gradients, strict=True
        ):
            if parameter.grad is not None:
                own.add_(parameter.grad)
            parameter.grad = own
