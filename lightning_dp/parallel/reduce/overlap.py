"""Sums of gradients between accelerators, while the backward runs."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_dp.parallel.comm import Packing, current_stream, wait_for_copies
from lightning_dp.parallel.torch_private import is_alone_in_memory


class Overlap:
    """Sends buckets of gradients to the root while the backward fills others.

    A hook of every parameter counts the gradients that a bucket still lacks. When a replica has
    all gradients of a bucket, they are taken off its parameters; when all replicas have them, the
    bucket goes up the chain. What a parameter gets after that (in a second checkpoint, say) is
    added at the end, as are buckets that stay incomplete. Autograd calls hooks in one thread per
    device, hence the lock.

    Args:
        rows: the parameters of the replicas that the backward fills; the root's are the first.
        packing: their buckets.
    """

    def __init__(self, rows: Sequence[Sequence[Tensor]], packing: Packing) -> None:
        self._rows, self._packing = rows, packing
        self._devices = list(dict.fromkeys(row[0].device for row in rows))
        self._lock = threading.Lock()
        # By bucket and replica: what has no gradient yet, and the streams that wrote the others.
        self._missing: dict[tuple[int, int], set[int]] = {}
        self._streams: dict[tuple[int, int], set[torch.Stream]] = {}
        self._taken: dict[int, dict[int, tuple[list[Tensor], torch.Event]]] = {}
        self._handles: list[RemovableHandle] = []
        for j, bucket in enumerate(packing.buckets):
            if not all([p.is_leaf and p.requires_grad for row in rows for p in bucket.of(row)]):
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
        # `add_up` sums in place: a gradient that shares its storage may still be read elsewhere.
        gradients = [g if is_alone_in_memory(g) else g.clone() for g in gradients]
        ready = here.record_event()
        for p in parameters:
            p.grad = None
        with self._lock:
            by_replica = self._taken.setdefault(j, {})
            by_replica[r] = gradients, ready
            if len(by_replica) == len(self._rows):
                taken = [by_replica[k] for k in range(len(by_replica))]
                self._packing.add_up(j, [row for row, _ in taken], [e for _, e in taken])

    def end(self, *, failed: bool = False) -> None:
        """The backward has ended: the root gets the sums, and what has not left is given back.

        What a parameter has got since then is added. Nothing is given back if the backward failed.
        """
        for handle in self._handles:
            handle.remove()
        self._missing.clear()
        wait_for_copies(self._devices)
        for j, by_replica in () if failed else self._taken.items():
            bucket, is_summed = self._packing.buckets[j], len(by_replica) == len(self._rows)
            for r in [0] if is_summed else by_replica:
                gradients, _ = by_replica[r]
                for parameter, gradient in zip(bucket.of(self._rows[r]), gradients, strict=True):
                    if parameter.grad is not None:
                        gradient.add_(parameter.grad)
                    parameter.grad = gradient
        self._taken.clear()
