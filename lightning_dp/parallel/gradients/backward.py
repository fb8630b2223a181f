"""Backward: what comes before and after it, so that the root ends up as on one device."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from lightning_dp.parallel.batch import Shards
from lightning_dp.parallel.gradients.hooks import GradientHooks
from lightning_dp.parallel.gradients.reduce import (
    Buffers,
    EarlierGradients,
    reduce_buffers,
    reduce_gradients,
)
from lightning_dp.parallel.replicas import Replicas


class Backward:
    """Brings gradients and buffers from the replicas to the root, at the right time.

    Args:
        replicas: the replicas.
        buffers: whose buffers the root keeps, see `reduce_buffers`.

    Attributes:
        accumulating: while True a backward leaves the gradients on the replicas, for a later one
            to reduce.
    """

    def __init__(self, replicas: Replicas, buffers: Buffers) -> None:
        self.accumulating = False
        self._replicas = replicas
        self._buffers: Buffers = buffers
        self._unsettled: Shards | None = None
        self._forwarded: Sequence[int] = ()
        self._hooks: GradientHooks | None = None
        self._earlier: EarlierGradients | None = None
        self._waiting = False

    def after_forward(self, shards: Shards) -> None:
        """Notes what is to be settled, after the backward or before the next step.

        That is whose buffers the root keeps, and whose rows of embeddings were shortened. Without
        gradients no backward will come: they are settled now.
        """
        self._forwarded = shards.active
        if not self.root_keeps_its_buffers(shards):
            self._unsettled = shards
        if not torch.is_grad_enabled():
            self._settle_forward()

    def before(self, *, can_fail: bool = False) -> None:
        """Takes the hooks of the root's parameters off, which are to see sums.

        Args:
            can_fail: whether the backward may run out of memory, to be undone and done again.
        """
        self._hooks = GradientHooks(self._replicas.parameters)
        self._earlier = EarlierGradients(self._replicas.parameters) if can_fail else None

    def after(self) -> None:
        """Reduces the gradients, unless they accumulate."""
        self._settle_forward()
        if self._hooks is not None:
            self._hooks.call()
        if self._earlier is not None:
            # By themselves first: apart from the earlier ones, they can still be undone.
            self._reduce()
            self._earlier.add()
        if self._earlier is None or self._earlier.any_on_replicas:
            self._reduce()
        self._hooks = self._earlier = None

    def _reduce(self) -> None:
        self._waiting = self.accumulating
        if not self.accumulating:
            reduce_gradients(self._replicas.parameters)

    def reduce_waiting(self) -> None:
        """Reduces what has accumulated on the replicas, if no backward has come to do so."""
        if self._waiting:
            self._waiting = False
            reduce_gradients(self._replicas.parameters)

    def settle(self) -> None:
        """Does what a step left open whose backward did not come or did not end."""
        self._settle_forward()
        self._put_back()

    def undo(self) -> None:
        """Takes back what a step has left that is to be run again."""
        self._unsettled, self._forwarded = None, ()
        self._put_back()

    def _put_back(self) -> None:
        if self._earlier is not None:
            self._earlier.put_back()
            self._earlier = None
        if self._hooks is not None:
            self._hooks.put_back()
            self._hooks = None

    def root_keeps_its_buffers(self, shards: Shards) -> bool:
        """Whether replica 0's buffers stay: they are the root's, since it is the module itself."""
        return self._buffers == "first" and shards.active[0] == 0

    def _settle_forward(self) -> None:
        """Not before the backward, which checks that nobody wrote to what it saved."""
        forwarded, self._forwarded = self._forwarded, ()
        self._replicas.adopt_rows(forwarded)
        shards, self._unsettled = self._unsettled, None
        if shards is not None:
            buffers = self._replicas.buffers
            worked = [buffers[k] for k in shards.active]
            reduce_buffers(buffers[0], worked, shards.active_sizes, self._buffers)


def wait_for_autograd(devices: Sequence[torch.device]) -> None:
    """Waits until autograd's threads are done with a backward that has failed.

    Whoever asked for it is told of the first error, while the threads of other devices may still
    work: they hold its graph, and write gradients. A little backward of all devices goes through
    the same threads after what they have begun. It is made in a new thread, whose work has the
    lowest numbers: among what waits for a device, that comes last.

    Not for code that itself runs in a backward: its own thread would wait for itself.

    Args:
        devices: those whose threads are waited for; the CPU has none.
    """

    def pass_through() -> None:
        ends = [torch.zeros(0, device=device, requires_grad=True) for device in others]
        ways = [end.clone() for end in ends]
        torch.autograd.grad(ways, ends, [torch.zeros_like(end) for end in ends])

    if others := [device for device in dict.fromkeys(devices) if device.type != "cpu"]:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(pass_through).result()
